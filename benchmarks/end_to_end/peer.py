"""One peer's training step on ready tensors, as a process of its own; prints one JSON object.

Both peers get the keys as tensors in memory, so that reading and parsing cost them nothing.
  torch    nn.EmbeddingBag(sparse=True) over all slots, Adagrad over it
  fbgemm   split table-batched embeddings on the CPU with fused per-element AdaGrad: what TorchRec's
           fused EmbeddingBagCollection runs
  dense    the same network without embeddings: what the dense part alone takes
"""
import argparse
import json
import resource
import statistics
import time

import numpy
import torch
from torch import nn

DENSE_FEATURES = 13 * 2  # As Terrace has them of Criteo's integers: a logarithm and a missing flag.
EMBEDDING_RATE = 0.05
DENSE_RATE = 1e-3
DISTINCT_BATCHES = 64  # Cycled through: more than the caches hold.


def zipf_keys(rng, count, cardinality, exponent):
    """Categories by a power law, in an order that says nothing of their rank."""
    weights = numpy.arange(1, cardinality + 1, dtype=numpy.float64) ** -exponent
    cumulative = numpy.cumsum(weights)
    ranks = numpy.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return rng.permutation(cardinality)[ranks]


class Inputs:
    def __init__(self, options):
        rng = numpy.random.default_rng(options.seed)
        shape = (DISTINCT_BATCHES, options.slots, options.minibatch)
        keys = numpy.empty(shape, dtype=numpy.int64)
        for slot in range(options.slots):
            keys[:, slot, :] = zipf_keys(rng, DISTINCT_BATCHES * options.minibatch, options.cardinality,
                                         options.zipf).reshape(DISTINCT_BATCHES, options.minibatch)
        self.keys = [torch.from_numpy(k.copy()) for k in keys]
        self.dense = [torch.rand(options.minibatch, DENSE_FEATURES) for _ in range(DISTINCT_BATCHES)]
        self.label = [(torch.rand(options.minibatch) < 0.2).float() for _ in range(DISTINCT_BATCHES)]


class TorchTables(nn.Module):
    """All slots in one table: one gather, one sparse gradient, one optimizer step."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        self.bag = nn.EmbeddingBag(options.slots * options.cardinality, options.dim, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -0.01, 0.01)
        self.first = (torch.arange(options.slots) * options.cardinality).view(-1, 1)
        self.offsets = torch.arange(options.slots * options.minibatch)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=EMBEDDING_RATE)

    def forward(self, keys):
        o = self.options
        pooled = self.bag((keys + self.first).reshape(-1), self.offsets)
        return pooled.view(o.slots, o.minibatch, o.dim).transpose(0, 1).reshape(o.minibatch, o.slots * o.dim)

    def apply_gradients(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class FbgemmTables:
    """The optimizer runs inside backward."""

    def __init__(self, options):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(options.cardinality, options.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * options.slots,
            optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=EMBEDDING_RATE, device=torch.device("cpu"))
        self.tables.init_embedding_weights_uniform(-0.01, 0.01)
        self.offsets = torch.arange(options.slots * options.minibatch + 1)

    def __call__(self, keys):
        return self.tables(keys.reshape(-1), self.offsets)

    def apply_gradients(self):
        pass


class NoTables:
    def __init__(self, options):
        self.input = torch.rand(options.minibatch, options.slots * options.dim)

    def __call__(self, keys):
        return self.input.requires_grad_(True)

    def apply_gradients(self):
        self.input.grad = None


def network(options):
    layers, width = [], options.slots * options.dim + DENSE_FEATURES
    for hidden in options.hidden:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, 1))


def measure(tables, options, inputs):
    net = network(options)
    optimizer = torch.optim.Adam(net.parameters(), lr=DENSE_RATE, fused=True)
    loss_function = nn.BCEWithLogitsLoss()

    def step(number):
        i = number % DISTINCT_BATCHES
        block = torch.cat([tables(inputs.keys[i]), inputs.dense[i]], 1)
        loss = loss_function(net(block).squeeze(1), inputs.label[i])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        tables.apply_gradients()
        return loss

    for number in range(DISTINCT_BATCHES):  # Every row is touched once: no page is new afterwards.
        loss = step(number)
    rates = []
    deadline = time.perf_counter() + options.seconds
    while time.perf_counter() < deadline or len(rates) < 5:
        start = time.perf_counter()
        for number in range(options.steps):
            loss = step(number)
        rates.append(options.steps * options.minibatch / (time.perf_counter() - start))
    assert torch.isfinite(loss)
    return {"median": statistics.median(rates), "least": min(rates), "most": max(rates), "samples": len(rates),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("torch", "fbgemm", "dense"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--slots", type=int, default=26)
    parser.add_argument("--hidden", type=lambda text: [int(x) for x in text.split(",")], default=[64, 32])
    parser.add_argument("--minibatch", type=int, default=512)
    parser.add_argument("--cardinality", type=int, default=100_000)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision(options.precision)
    tables = {"torch": TorchTables, "fbgemm": FbgemmTables, "dense": NoTables}[options.peer](options)
    print(json.dumps(measure(tables, options, Inputs(options))))


if __name__ == "__main__":
    main()
