"""The `dnn` network with its optimizers in float64, written from docs/optimizers.md, docs/formats/row.md
and docs/data.md alone; shares no code with the program."""
import math

import numpy

MASK = (1 << 64) - 1
FIRST_CATEGORY_SLOT = 14
SLOTS, INTEGERS = 26, 13


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def combine(a, b):
    return mix(a ^ mix(b))


def name_hash(name):
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def read_log(path):
    """(labels, dense features, keys) of a Criteo file without missing categories."""
    labels, dense, keys = [], [], []
    for line in open(path):
        columns = line.rstrip("\n").split("\t")
        labels.append(float(columns[0]))
        logs, missing = numpy.zeros(INTEGERS), numpy.zeros(INTEGERS)
        for i, text in enumerate(columns[1:1 + INTEGERS]):
            if text:
                logs[i] = math.copysign(math.log1p(abs(int(text))), int(text))
            else:
                missing[i] = 1
        dense.append(numpy.concatenate([logs, missing]))
        keys.append([(FIRST_CATEGORY_SLOT + i) << 48 | int(text, 16)
                     for i, text in enumerate(columns[1 + INTEGERS:])])
    return numpy.array(labels), numpy.array(dense), keys


def uniform_row(seed, table, segment, key, dim, scale):
    state = combine(combine(seed, combine(name_hash(table), name_hash(segment))), key)
    weights = numpy.empty(dim)
    for i in range(dim):
        bits = mix((state + (i // 2) * 0x9E3779B97F4A7C15) & MASK)
        k = bits >> 40 if i % 2 == 0 else (bits >> 8) & 0xFFFFFF
        weights[i] = numpy.float32(scale) * numpy.float32((k - (1 << 23)) * 2.0**-23)
    return weights


def linear_weight(seed, name, fan_in, fan_out):
    stream, bound = combine(seed, name_hash(name)), math.sqrt(6.0 / fan_in)
    values = [numpy.float32((2.0 * ((combine(stream, i) >> 11) * 2.0**-53) - 1.0) * bound)
              for i in range(fan_in * fan_out)]
    return numpy.array(values, dtype=numpy.float64).reshape(fan_in, fan_out)


class Sparse:
    """Optimizers of rows; the state is a dict per key."""

    def __init__(self, spec):
        self.type, self.rate = spec["type"], spec.get("learning_rate", 0.0)
        self.epsilon = 1e-8
        self.beta1, self.beta2 = float(numpy.float32(0.9)), float(numpy.float32(0.999))
        self.alpha, self.beta, self.l1, self.l2 = self.rate, spec.get("beta", 1.0), spec.get("l1", 0.0), spec.get("l2", 0.0)

    def new_state(self, dim):
        zeros = numpy.zeros
        return {"sgd": {}, "adagrad": {"G": zeros(dim)}, "adagrad_row": {"G": 0.0},
                "adam": {"m": zeros(dim), "v": zeros(dim), "t": 0}, "ftrl": {"z": zeros(dim), "n": zeros(dim)}}[self.type]

    def apply(self, w, g, s):
        if self.type == "sgd":
            return w - self.rate * g
        if self.type == "adagrad":
            s["G"] = s["G"] + g * g
            return w - self.rate * g / (numpy.sqrt(s["G"]) + self.epsilon)
        if self.type == "adagrad_row":
            s["G"] += float(numpy.mean(g * g))
            return w - self.rate / (math.sqrt(s["G"]) + self.epsilon) * g
        if self.type == "adam":
            s["t"] += 1
            s["m"] = self.beta1 * s["m"] + (1 - self.beta1) * g
            s["v"] = self.beta2 * s["v"] + (1 - self.beta2) * g * g
            a = self.rate / (1 - self.beta1 ** s["t"])
            return w - a * s["m"] / (numpy.sqrt(s["v"]) / math.sqrt(1 - self.beta2 ** s["t"]) + self.epsilon)
        n = s["n"] + g * g
        sigma = (numpy.sqrt(n) - numpy.sqrt(s["n"])) / self.alpha
        s["z"] = s["z"] + g - sigma * w
        s["n"] = n
        shrunk = s["z"] - numpy.sign(s["z"]) * self.l1
        return numpy.where(numpy.abs(s["z"]) <= self.l1, 0.0,
                           -shrunk / ((self.beta + numpy.sqrt(n)) / self.alpha + self.l2))


class Dense:
    def __init__(self, spec, parameters):
        self.type, self.rate, self.epsilon = spec["type"], spec["learning_rate"], 1e-8
        self.momentum = spec.get("momentum", 0.0)
        self.beta1, self.beta2, self.t = float(numpy.float32(0.9)), float(numpy.float32(0.999)), 0
        self.first = [numpy.zeros_like(p) for p in parameters]
        self.second = [numpy.zeros_like(p) for p in parameters]

    def apply(self, parameters, gradients):
        self.t += 1
        for w, g, m, v in zip(parameters, gradients, self.first, self.second):
            if self.type == "sgd":
                m[...] = self.momentum * m + g
                w -= self.rate * m
            elif self.type == "adagrad":
                m += g * g
                w -= self.rate * g / (numpy.sqrt(m) + self.epsilon)
            else:
                m[...] = self.beta1 * m + (1 - self.beta1) * g
                v[...] = self.beta2 * v + (1 - self.beta2) * g * g
                size = self.rate / (1 - self.beta1 ** self.t)
                w -= size * m / (numpy.sqrt(v) / math.sqrt(1 - self.beta2 ** self.t) + self.epsilon)


def initial_parameters(seed, dim, hidden):
    """Weight and bias of each layer, as a run with that seed starts them."""
    widths, parameters = [SLOTS * dim + 2 * INTEGERS, *hidden, 1], []
    for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
        parameters += [linear_weight(seed, f"linear{i}.weight", fan_in, fan_out), numpy.zeros(fan_out)]
    return parameters


class Dnn:
    """Trains as a job says from the given rows (by key) and parameters; `step` returns the loss before it."""

    def __init__(self, job, dim, rows, parameters):
        self.dim, self.wide = dim, job["network"].get("wide", False)
        self.sparse = Sparse(job["table"]["optimizer"])
        self.parameters = parameters
        self.nearest_kink = math.inf  # Smallest magnitude that a ReLU has met.
        self.dense = Dense(job["network"]["optimizer"], parameters)
        self.rows = rows
        self.states = {key: self.sparse.new_state(dim) for key in rows}
        self.wide_rows = {key: numpy.zeros(1) for key in rows}
        self.wide_states = {key: self.sparse.new_state(1) for key in rows}
        # docs/admission.md, with exact counts.
        self.admit_after, self.shows = job["table"].get("admit_after", 0), {}
        self.unadmitted = 0  # Shows of keys that were not.
        # docs/expiry.md, tested and decayed at each point for all rows.
        self.expiry = {"every": job["table"].get("expire_every_examples", 0), "after": job["table"].get("expire_after", 0),
                       "below": job["table"].get("expire_below", 0), "show": job["table"].get("expire_show_weight", 0.1),
                       "click": job["table"].get("expire_click_weight", 1.0), "decay": job["table"].get("expire_decay", 0.98)}
        self.first_rows = {key: row.copy() for key, row in rows.items()}
        self.statistics = {}  # Of rows that exist: [show, click, last seen].
        self.examples = self.expired = 0

    def admitted(self, key):
        return self.admit_after < 2 or self.shows.get(key, 0) >= self.admit_after

    def step(self, labels, dense, keys):
        count = len(labels)
        zeros = numpy.zeros(self.dim)
        embedding = numpy.array([numpy.concatenate([self.rows[k] if self.admitted(k) else zeros for k in line])
                                 for line in keys])
        activations = [numpy.concatenate([embedding, dense], axis=1)]
        layers = len(self.parameters) // 2
        for i in range(layers):
            z = activations[-1] @ self.parameters[2 * i] + self.parameters[2 * i + 1]
            activations.append(numpy.maximum(z, 0) if i + 1 < layers else z)
            if i + 1 < layers:
                self.nearest_kink = min(self.nearest_kink, float(numpy.abs(z).min()))
        logit = activations[-1][:, 0]
        if self.wide:
            logit = logit + numpy.array([sum(self.wide_rows[k][0] for k in line if self.admitted(k)) for line in keys])
        loss = float(numpy.mean(numpy.logaddexp(0, logit) - labels * logit))

        logit_gradient = (1 / (1 + numpy.exp(-logit)) - labels) / count
        gradient, gradients = logit_gradient[:, None], [None] * len(self.parameters)
        for i in reversed(range(layers)):
            gradients[2 * i], gradients[2 * i + 1] = activations[i].T @ gradient, gradient.sum(axis=0)
            gradient = gradient @ self.parameters[2 * i].T
            if i > 0:
                gradient = gradient * (activations[i] > 0)
        self.dense.apply(self.parameters, gradients)
        self.apply_sparse(keys, gradient, logit_gradient)
        self.count_statistics(labels, keys)
        self.count_shows(keys)
        self.expire(count)
        return loss

    def apply_sparse(self, keys, gradient, logit_gradient):
        sums, wide_sums = {}, {}
        for e, line in enumerate(keys):
            for slot, key in enumerate(line):
                if not self.admitted(key):
                    continue
                sums[key] = sums.get(key, 0) + gradient[e, slot * self.dim:(slot + 1) * self.dim]
                wide_sums[key] = wide_sums.get(key, 0) + logit_gradient[e]
        for key, g in sums.items():
            self.rows[key] = self.sparse.apply(self.rows[key], g, self.states[key])
            if self.wide:
                self.wide_rows[key] = self.sparse.apply(self.wide_rows[key], numpy.array([wide_sums[key]]),
                                                        self.wide_states[key])

    def count_statistics(self, labels, keys):
        for label, line in zip(labels, keys):
            for key in filter(self.admitted, set(line)):
                show, click, _ = self.statistics.get(key, (0, 0, 0))
                self.statistics[key] = [show + 1, click + label, self.examples + len(labels)]

    def expire(self, count):
        """At the end of a mini-batch that reaches multiples of `every`; rows that it held are spared."""
        before, self.examples = self.examples, self.examples + count
        every = self.expiry["every"]
        points = self.examples // every - before // every if every else 0
        if points == 0:
            return
        newest = self.examples // every * every
        for key, (show, click, seen) in list(self.statistics.items()):
            if seen == self.examples:
                continue
            if self.expiry["below"] > 0:
                show, click = show * self.expiry["decay"] ** points, click * self.expiry["decay"] ** points
            self.statistics[key] = [show, click, seen]
            score = self.expiry["show"] * (show - click) + self.expiry["click"] * click
            old = self.expiry["after"] > 0 and newest - seen >= self.expiry["after"]
            if old or score < self.expiry["below"]:
                del self.statistics[key]
                self.expired += 1
                self.rows[key], self.states[key] = self.first_rows[key].copy(), self.sparse.new_state(self.dim)
                self.wide_rows[key], self.wide_states[key] = numpy.zeros(1), self.sparse.new_state(1)

    def count_shows(self, keys):
        """They count from the next mini-batch on."""
        shown = [key for line in keys for key in set(line)]
        self.unadmitted += sum(not self.admitted(key) for key in shown)
        for key in shown:
            self.shows[key] = self.shows.get(key, 0) + 1
