#include "terrace/train/job_keys.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/train/job_key_builder.h"

namespace terrace {
namespace {

using job_keys::AndThen;
using job_keys::Builder;
using job_keys::ExactBytes;
using job_keys::Expected;
using job_keys::Identifies;
using job_keys::kMax64;
using job_keys::kMostNumber;
using job_keys::OnlyFor;
using job_keys::OrNull;
using job_keys::Range;
using job_keys::Shown;
using Sparse = SparseOptimizerSpec::Type;

constexpr std::uint64_t kMaxExpectedKeys = 1'000'000'000'000'000;
constexpr std::uint64_t kTiB = std::uint64_t{1} << 40;

// As rates and initial weights: a gradient beyond 1e15 is refused, and with these l2 * w, which is
// added to it, stays within about as much (docs/optimizers.md).
constexpr double kMostL2 = 1e6;

template <typename Get>
void AddLearningRate(Builder* b, const std::string& path, Get get, bool identifies) {
  const auto scheduled = [get](const Job& job, const std::string& name) {
    const LearningRate& rate = get(Builder::Mutable(job), name);
    return rate.warmup_steps != 0 || rate.decay != LearningRate::Decay::kNone ||
           rate.decay_steps != 0 || rate.final != 0;
  };
  const auto base = [get](Job& job, const std::string& name) -> double& {
    return get(job, name).base;
  };
  JobKey& whole =
      b->Number(path, base, {0, 1e6, true}, "A number, or a schedule with the keys below it.");
  whole.identifies = identifies;
  whole.type = "number or schedule";
  whole.set = [get, set = whole.set](const JobNode& node, Job* job, const std::string& name) {
    LearningRate& rate = get(*job, name);
    const double kept = rate.base;
    rate = LearningRate();
    rate.base = kept;
    // A schedule's own keys say the rest.
    return node.kind == JobNode::Kind::kMap ? std::string() : set(node, job, name);
  };
  const auto when = [](JobKey& key, auto condition, bool wanted) {
    key.print = [print = key.print, condition, wanted](const Job& job, const std::string& name) {
      return condition(job, name) == wanted ? print(job, name) : std::nullopt;
    };
  };
  when(whole, scheduled, false);
  const auto add = [&](JobKey& key) {
    key.identifies = identifies;
    when(key, scheduled, true);
  };
  add(b->Number(path + ".base", base, {0, 1e6, true}, "The rate after the warm-up."));
  add(b->Whole(
      path + ".warmup_steps",
      [get](Job & job, const std::string& name) -> auto& { return get(job, name).warmup_steps; }, 0,
      kMax64, "Mini-batches in which the rate rises linearly to its base."));
  add(b->Choice(
      path + ".decay",
      [get](Job & job, const std::string& name) -> auto& { return get(job, name).decay; },
      std::vector<std::pair<std::string, LearningRate::Decay>>{
          {"none", LearningRate::Decay::kNone},
          {"linear", LearningRate::Decay::kLinear},
          {"cosine", LearningRate::Decay::kCosine}},
      "How the rate falls after the warm-up."));
  add(b->Whole(
      path + ".decay_steps",
      [get](Job & job, const std::string& name) -> auto& { return get(job, name).decay_steps; }, 0,
      kMax64, "Mini-batches of the fall."));
  add(b->Number(
      path + ".final",
      [get](Job & job, const std::string& name) -> auto& { return get(job, name).final; }, {0, 1e6},
      "The rate after the fall."));
}

// The defaults that come with a type.
void ResetSparse(SparseOptimizerSpec* spec, LearningRate* rate) {
  const Sparse type = spec->type;
  *spec = SparseOptimizerSpec();
  spec->type = type;
  *rate = LearningRate();
  rate->base = type == Sparse::kAdam ? 0.001 : 0.05;
}

template <typename GetSpec, typename GetRate>
void AddSparseOptimizer(Builder* b, const std::string& path, GetSpec spec, GetRate rate) {
  using Types = std::vector<Sparse>;
  const auto only = [spec](JobKey& key, Types types, std::string text) {
    OnlyFor(key, std::move(text), [spec, types](const Job& job, const std::string& name) {
      const Sparse type = spec(Builder::Mutable(job), name).type;
      return std::find(types.begin(), types.end(), type) != types.end();
    });
  };
  AndThen(b->Choice(
              path + ".type",
              [spec](Job & job, const std::string& name) -> auto& { return spec(job, name).type; },
              std::vector<std::pair<std::string, Sparse>>{{"sgd", Sparse::kSgd},
                                                          {"adagrad", Sparse::kAdaGrad},
                                                          {"adagrad_row", Sparse::kAdaGradRow},
                                                          {"adam", Sparse::kAdam},
                                                          {"ftrl", Sparse::kFtrl}},
              "A type brings its own defaults of all that follows."),
          [spec, rate](Job& job, const std::string& name) {
            ResetSparse(&spec(job, name), &rate(job, name));
          });
  AddLearningRate(b, path + ".learning_rate", rate, false);
  const Types adagrad = {Sparse::kAdaGrad, Sparse::kAdaGradRow};
  const Types ftrl = {Sparse::kFtrl};
  const auto number = [&](const char* key, auto field, Range range, const char* doc) -> JobKey& {
    return b->Number(
        path + "." + key,
        [spec, field](Job& job, const std::string& name) -> float& {
          return spec(job, name).*field;
        },
        range, doc);
  };
  only(number("initial_accumulator", &SparseOptimizerSpec::initial_accumulator, {0, kMostNumber},
              "What the sum of squares starts at."),
       adagrad, "type adagrad, adagrad_row");
  only(number("epsilon", &SparseOptimizerSpec::epsilon, {0, 1, true}, "Keeps a division finite."),
       {Sparse::kAdaGrad, Sparse::kAdaGradRow, Sparse::kAdam}, "type adagrad, adagrad_row, adam");
  only(number("beta1", &SparseOptimizerSpec::beta1, {0, 0.999999}, "Decay of the first moment."),
       {Sparse::kAdam}, "type adam");
  only(number("beta2", &SparseOptimizerSpec::beta2, {0, 0.999999}, "Decay of the second moment."),
       {Sparse::kAdam}, "type adam");
  only(number("l1", &SparseOptimizerSpec::l1, {0, kMostNumber}, "L1: weights below it stay 0."),
       ftrl, "type ftrl");
  only(number("l2", &SparseOptimizerSpec::l2, {0, kMostNumber}, "L2 of FTRL's own formula."), ftrl,
       "type ftrl");
  only(number("beta", &SparseOptimizerSpec::beta, {0, kMostNumber}, "Smooths the first steps."),
       ftrl, "type ftrl");
}

template <typename Get>
void AddAdmission(Builder* b, const std::string& path, Get table) {
  const auto field = [table](auto member) {
    return [ table, member ](Job & job, const std::string& name) -> auto& {
      return table(job, name).admission.*member;
    };
  };
  b->Whole(path + ".admit_after", field(&AdmissionSpec::after), 0, kMaxAdmitAfter,
           "A key gets its row after so many shows (examples that hold it); until then it reads as "
           "zeros. 0 and 1: with the first.");
  OnlyFor(b->Bytes(path + ".admit_filter", field(&AdmissionSpec::filter_bytes),
                   kLeastAdmitFilterBytes, kTiB,
                   "Of the filter that counts shows; twice so much memory is used. Too small a "
                   "filter admits keys too soon."),
          "admit_after of 2 or more", [table](const Job& job, const std::string& name) {
            return table(Builder::Mutable(job), name).admission.on();
          });
}

template <typename Get>
void AddExpiry(Builder* b, const std::string& path, Get table) {
  const auto field = [table](auto member) {
    return [ table, member ](Job & job, const std::string& name) -> auto& {
      return table(job, name).expiry.*member;
    };
  };
  const auto when_on = [table](JobKey& key) {
    OnlyFor(key, "expire_every_examples above 0", [table](const Job& job, const std::string& name) {
      return table(Builder::Mutable(job), name).expiry.on();
    });
  };
  const auto for_score = [table](JobKey& key) {
    OnlyFor(key, "expire_below above 0", [table](const Job& job, const std::string& name) {
      const ExpirySpec& spec = table(Builder::Mutable(job), name).expiry;
      return spec.on() && spec.below > 0;
    });
  };
  b->Whole(path + ".expire_every_examples", field(&ExpirySpec::every_examples), 0, kMax64,
           "Rows expire at the ends of mini-batches that reach a multiple of so many examples of "
           "the run. 0: never.");
  when_on(
      b->Whole(path + ".expire_after", field(&ExpirySpec::after), 0, kMax64,
               "A row expires when it was not seen for so many examples. 0: age is no reason."));
  when_on(b->Number(
      path + ".expire_below", field(&ExpirySpec::below), {0, kMostNumber},
      "A row expires when its score is lower: 0.000001 or more. 0: the score is no reason."));
  for_score(b->Number(path + ".expire_show_weight", field(&ExpirySpec::show_weight),
                      {0, kMostNumber}, "What a show without click adds to a score."));
  for_score(b->Number(path + ".expire_click_weight", field(&ExpirySpec::click_weight),
                      {0, kMostNumber},
                      "What a click adds to a score; expire_show_weight or more."));
  for_score(b->Number(path + ".expire_decay", field(&ExpirySpec::decay), {0, 1},
                      "What is left of a row's show and click from one expiry point to the next."));
}

template <typename Get>
void AddIndex(Builder* b, const std::string& path, Get table) {
  b->Choice(
      path + ".index",
      [table](Job & job, const std::string& name) -> auto& { return table(job, name).index; },
      std::vector<std::pair<std::string, IndexChoice>>{
          {"auto", IndexChoice::kAuto}, {"key", IndexChoice::kKey}, {"group", IndexChoice::kGroup}},
      "What memory keeps of rows on disk: about 8 bytes a key, or 1.5 to 4 for groups of keys, "
      "whose "
      "reads and writes take more bytes. Fixed for the life of a run. auto: by expected_keys and "
      "memory.budget.");
  b->Whole(
      path + ".expected_keys",
      [table](Job & job, const std::string& name) -> auto& {
        return table(job, name).expected_keys;
      },
      0, kMaxExpectedKeys,
      "Keys that the table will have. With more of them an index by group takes more memory. 0: "
      "unknown.");
  const auto by_group = [table](JobKey& key) {
    OnlyFor(key, "index group or auto", [table](const Job& job, const std::string& name) {
      return table(Builder::Mutable(job), name).index != IndexChoice::kKey;
    });
  };
  const std::string legal =
      fmt::format("multiples of 4KiB up to {}", ExactBytes(GroupShape::kMostBlockBytes));
  by_group(b->BytesOrAuto(
      path + ".group_block", legal, "16KiB",
      [table, legal](Job* job, const std::string& name, std::optional<std::uint64_t> bytes) {
        const std::uint64_t block = bytes.value_or(0);
        if (bytes && (block == 0 || block % 4096 != 0 || block > GroupShape::kMostBlockBytes)) {
          return fmt::format("is {}; legal: auto or {}", ExactBytes(block), legal);
        }
        table(*job, name).group.block_bytes = static_cast<std::uint32_t>(block);
        return std::string();
      },
      [table](const Job& job, const std::string& name) {
        const std::uint32_t block = table(Builder::Mutable(job), name).group.block_bytes;
        return block == 0 ? std::nullopt : std::optional<std::uint64_t>(block);
      },
      "Of an index by group: what the rows of a group take on disk. Larger blocks take less memory "
      "a key and more bytes a read and a write. Fixed for the life of a run. auto: the least that "
      "four rows fit in, and in a run that goes on what it has."));
  by_group(b->Whole(
      path + ".group_filter_bits",
      [table](Job & job, const std::string& name) -> auto& {
        return table(job, name).group.filter_bits;
      },
      0, GroupShape::kMostFilterBits,
      "Of an index by group: bits of memory for each expected key that tell which keys are not "
      "there. Fewer mistake more new keys for old ones, each of which costs a read: 10 one in 120, "
      "5 one in 11, 0 all."));
}

template <typename Get>
void AddTable(Builder* b, const std::string& path, Get table) {
  using Type = InitializerSpec::Type;
  b->Whole(
      path + ".dim",
      [table](Job & job, const std::string& name) -> auto& { return table(job, name).dim; }, 1,
      4096, "Weights of a key.");
  AddSparseOptimizer(
      b, path + ".optimizer",
      [table](Job & job, const std::string& name) -> auto& { return table(job, name).optimizer; },
      [table](Job & job, const std::string& name) -> auto& {
        return table(job, name).learning_rate;
      });
  b->Choice(
      path + ".initializer.type",
      [table](Job & job, const std::string& name) -> auto& {
        return table(job, name).initializer.type;
      },
      std::vector<std::pair<std::string, Type>>{{"zeros", Type::kZeros},
                                                {"constant", Type::kConstant},
                                                {"uniform", Type::kUniform},
                                                {"normal", Type::kNormal}},
      "What a key's weights start as; zeros where the optimizer is ftrl.");
  OnlyFor(
      b->Number(
          path + ".initializer.scale",
          [table](Job & job, const std::string& name) -> auto& {
            return table(job, name).initializer.scale;
          },
          {-1e6, 1e6},
          "uniform: within [-scale, scale); normal: standard deviation; constant: the value, which "
          "alone may be negative."),
      "initializer.type other than zeros", [table](const Job& job, const std::string& name) {
        return table(Builder::Mutable(job), name).initializer.type != Type::kZeros;
      });
  b->Number(
      path + ".l2",
      [table](Job & job, const std::string& name) -> auto& { return table(job, name).l2; },
      {0, kMostL2}, "l2 * w is added to a row's gradient when the row is touched.");
  AddIndex(b, path, table);
  AddAdmission(b, path, table);
  AddExpiry(b, path, table);
}

void AddRun(Builder* b) {
  JobKey& version = b->Custom("format_version", "whole number", "1", "Of this file.");
  version.set = [](const JobNode& node, Job*, const std::string&) -> std::string {
    if (node.kind == JobNode::Kind::kScalar && node.scalar == "1") return "";
    return fmt::format("is {}; this program reads version 1", Shown(node));
  };
  version.print = [](const Job&, const std::string&) { return std::optional<std::string>("1"); };
  Identifies(b->Whole(
      "seed", [](Job & job, const std::string&) -> auto& { return job.seed; }, 0, kMax64,
      "Of all random numbers of the run."));
  Identifies(b->Word(
      "device", [](Job & job, const std::string&) -> auto& { return job.device; },
      {"cpu", "cuda", "auto"},
      "Where the network and the warm rows are. This version has cpu alone: auto means it, and "
      "cuda is refused."));
  b->Text(
       "output", [](Job & job, const std::string&) -> auto& { return job.output; },
       "The run's folder: everything lies there unless ssd.paths says otherwise.")
      .default_note = "required";
  b->Word(
      "binding", [](Job & job, const std::string&) -> auto& { return job.binding; },
      {"auto", "off"},
      "auto: I/O, reading, pulling and training each have cores of their own where these are "
      "enough for their threads, and memory comes from all NUMA nodes in turn.");
}

void AddData(Builder* b) {
  const auto criteo = [](const Job& job, const std::string&) {
    return job.train_data.format == "criteo";
  };
  const auto synthetic = [](const Job& job, const std::string&) {
    return job.train_data.format == "synthetic";
  };
  const auto field = [](auto member) {
    return [member](Job & job, const std::string&) -> auto& { return job.train_data.*member; };
  };
  b->Word("data.format", field(&DataOptions::format), {"criteo", "synthetic"},
          "Criteo's text, or a generated click log.");
  JobKey& train = b->TextList("data.train", field(&DataOptions::files), {},
                              "Files and globs, in order; plain, gzip or zstd.");
  OnlyFor(train, "format criteo", criteo);
  train.default_note = "required";
  OnlyFor(b->TextList(
              "data.validation",
              [](Job & job, const std::string&) -> auto& { return job.validation_data.files; }, {},
              "Files and globs to evaluate on; they train nothing."),
          "format criteo", criteo);
  b->Whole("data.epochs", field(&DataOptions::epochs), 1, 1'000'000, "Passes over the examples.");
  b->Whole("data.seed", field(&DataOptions::seed), 0, kMax64, "Of shuffling.").default_note =
      "as seed";
  b->Word("data.shuffle", field(&DataOptions::shuffle), {"none", "files", "examples"},
          "Order of an epoch, seeded by (data.seed, epoch): as given, files in random order, or "
          "examples within windows too.");
  b->Whole("data.shuffle_window", field(&DataOptions::shuffle_window), 1, 1 << 24,
           "Examples that change places among themselves; memory grows with it.");
  OnlyFor(Identifies(b->Word("data.integers", field(&DataOptions::integers),
                             {"dense", "bucket", "both"},
                             "What becomes of integer columns: dense features, keys of their "
                             "buckets, or both.")),
          "format criteo", criteo);
  OnlyFor(Identifies(b->Word("data.missing", field(&DataOptions::missing), {"skip", "key"},
                             "An empty category has no key, or one of its own.")),
          "format criteo", criteo);
  b->Number("data.max_bad_fraction", field(&DataOptions::max_bad_fraction), {0, 1},
            "More bad lines than this share of all stop the run.");
  b->Bytes("data.read_ahead", field(&DataOptions::read_ahead_bytes), 64 << 10, kMax64,
           "Memory for reading ahead, at most. No more is used than a 128th of memory.budget (1MiB "
           "where that is less than 1MiB), and never more than 1GiB.");
  JobKey& rows = b->Whole("data.rows", field(&DataOptions::rows), 1, std::uint64_t{1} << 48,
                          "Examples of an epoch.");
  OnlyFor(rows, "format synthetic", synthetic);
  rows.default_note = "required";
  OnlyFor(b->Whole(
              "data.validation_rows",
              [](Job & job, const std::string&) -> auto& { return job.validation_data.rows; }, 0,
              std::uint64_t{1} << 48, "Examples to evaluate on: the rows after those of training."),
          "format synthetic", synthetic);
  OnlyFor(b->Whole("data.first_row", field(&DataOptions::first_row), 0, std::uint64_t{1} << 48,
                   "Row of the log at which training begins."),
          "format synthetic", synthetic);
  OnlyFor(b->Whole("data.cardinality", field(&DataOptions::cardinality), 1, 1'000'000'000'000,
                   "Categories of a slot."),
          "format synthetic", synthetic);
  OnlyFor(b->Whole("data.log_seed", field(&DataOptions::log_seed), 0, kMax64,
                   "Of the generated log itself."),
          "format synthetic", synthetic);
  OnlyFor(b->Number("data.zipf", field(&DataOptions::zipf), {0, 4},
                    "Exponent of the categories' power law; 0: all alike."),
          "format synthetic", synthetic);
  OnlyFor(b->Whole("data.slots", field(&DataOptions::categorical_slots), 1, 256,
                   "Categorical slots of the log."),
          "format synthetic", synthetic);
}

void AddTables(Builder* b) {
  AddTable(
      b, "table", [](Job & job, const std::string&) -> auto& { return job.table; });
  AddTable(
      b, "tables.*",
      [](Job & job, const std::string& name) -> auto& { return job.tables.at(name); });
  JobKey& table = b->Text(
      "slots.*.table",
      [](Job & job, const std::string& name) -> auto& { return job.slots.at(name).table; },
      "The table that holds the slot's rows.");
  table.default_note = "default";
  JobKey& dim = b->Whole(
      "slots.*.dim",
      [](Job & job, const std::string& name) -> auto& { return job.slots.at(name).dim; }, 0, 4096,
      "Weights of a key; another than its table's makes a table of its own. 0: the table's.");
  dim.default_note = "the table's";
  b->Choice(
      "slots.*.pooling",
      [](Job & job, const std::string& name) -> auto& { return job.slots.at(name).pooling; },
      std::vector<std::pair<std::string, SlotJob::Pooling>>{{"sum", SlotJob::Pooling::kSum},
                                                            {"mean", SlotJob::Pooling::kMean}},
      "How the weights of several keys become one input.");
}

void AddNetworkOptimizer(Builder* b) {
  const auto spec = [](auto member) {
    return [member](Job & job, const std::string&) -> auto& {
      return job.network.optimizer.*member;
    };
  };
  const auto only = [](JobKey& key, std::vector<std::string> types) {
    std::string text = "type ";
    for (const std::string& type : types) text += (&type == &types[0] ? "" : ", ") + type;
    OnlyFor(Identifies(key), text, [types](const Job& job, const std::string&) {
      return std::find(types.begin(), types.end(), job.network.optimizer.type) != types.end();
    });
  };
  AndThen(Identifies(b->Word("network.optimizer.type", spec(&DenseOptimizerSpec::type),
                             {"sgd", "adagrad", "adam"},
                             "A type brings its own defaults of all that follows.")),
          [](Job& job, const std::string&) {
            const std::string type = job.network.optimizer.type;
            job.network.optimizer = DenseOptimizerSpec();
            job.network.optimizer.type = type;
            job.network_learning_rate = LearningRate();
            job.network_learning_rate.base = type == "adam" ? 0.001 : 0.01;
          });
  AddLearningRate(
      b, "network.optimizer.learning_rate",
      [](Job & job, const std::string&) -> auto& { return job.network_learning_rate; }, true);
  only(b->Number("network.optimizer.epsilon", spec(&DenseOptimizerSpec::epsilon), {0, 1, true},
                 "Keeps a division finite."),
       {"adagrad", "adam"});
  only(b->Number("network.optimizer.beta1", spec(&DenseOptimizerSpec::beta1), {0, 0.999999},
                 "Decay of the first moment."),
       {"adam"});
  only(b->Number("network.optimizer.beta2", spec(&DenseOptimizerSpec::beta2), {0, 0.999999},
                 "Decay of the second moment."),
       {"adam"});
  only(b->Number("network.optimizer.initial_accumulator",
                 spec(&DenseOptimizerSpec::initial_accumulator), {0, kMostNumber},
                 "What the sum of squares starts at."),
       {"adagrad"});
  only(b->Number("network.optimizer.momentum", spec(&DenseOptimizerSpec::momentum), {0, 0.999999},
                 "Share of the last step that goes on."),
       {"sgd"});
  Identifies(b->Number("network.optimizer.l2", spec(&DenseOptimizerSpec::l2), {0, kMostL2},
                       "l2 * w is added to the gradient."));
  Identifies(OrNull(b->Number(
      "network.optimizer.clip_norm", spec(&DenseOptimizerSpec::clip_norm), {0, kMostNumber},
      "A longer gradient of the whole network is scaled down to this norm; null or 0: none is.")));
}

void AddNetwork(Builder* b) {
  const auto network = [](auto member) {
    return [member](Job & job, const std::string&) -> auto& { return job.network.*member; };
  };
  Identifies(b->Word("network.type", network(&NetworkSpec::type), {"dnn"},
                     "dnn: pooled embeddings and dense features, hidden layers, logit."));
  JobKey& hidden = b->Custom("network.hidden", "list of whole numbers", "1 to 65,536 each",
                             "Widths of the hidden layers, at most 32.");
  hidden.identifies = true;
  hidden.set = [](const JobNode& node, Job* job, const std::string&) -> std::string {
    if (node.kind != JobNode::Kind::kList) return Expected("a list such as [256, 128]", node);
    if (node.items.size() > 32) return "has more than 32 layers";
    std::vector<std::uint32_t> widths;
    for (const JobNode& item : node.items) {
      const std::optional<std::uint64_t> width =
          item.kind == JobNode::Kind::kScalar ? ParseWhole(item.scalar) : std::nullopt;
      if (!width || *width < 1 || *width > 65536) {
        return fmt::format("has {}; legal: widths of 1 to 65,536", Shown(item));
      }
      widths.push_back(static_cast<std::uint32_t>(*width));
    }
    job->network.hidden = std::move(widths);
    return "";
  };
  hidden.print = [](const Job& job, const std::string&) {
    return std::optional<std::string>(fmt::format("[{}]", fmt::join(job.network.hidden, ", ")));
  };
  Identifies(
      b->Bool("network.wide", network(&NetworkSpec::wide), "Adds a weight per key to the logit."));
  const std::size_t first = b->size();
  AddSparseOptimizer(
      b, "network.wide_optimizer",
      [](Job & job, const std::string&) -> auto& { return job.wide_optimizer; },
      [](Job & job, const std::string&) -> auto& { return job.wide_learning_rate; });
  b->OnlyPrintFrom(
      first, [](const Job& job) { return job.wide_optimizer_given; }, "as the key's table");
  OnlyFor(b->Number(
              "network.wide_l2", [](Job & job, const std::string&) -> auto& { return job.wide_l2; },
              {0, kMostL2}, "As table.l2, of the wide weights."),
          "wide: true", [](const Job& job, const std::string&) { return job.network.wide; });
  AddNetworkOptimizer(b);
}

void AddTraining(Builder* b) {
  Identifies(b->Whole(
      "training.minibatch",
      [](Job & job, const std::string&) -> auto& { return job.training.minibatch; }, 1, 1 << 20,
      "Examples of one optimizer step."));
  b->Whole(
      "training.batch", [](Job & job, const std::string&) -> auto& { return job.training.batch; },
      1, 1 << 26,
      "Examples whose rows are brought up together, at most: fewer where they would take more than "
      "an eighth of the memory that is left for rows and batches (the memory line at the start "
      "says "
      "how many). A multiple of minibatch; by default 65536, rounded up to one. Changes no "
      "result.");
  Identifies(b->Whole(
      "training.threads",
      [](Job & job, const std::string&) -> auto& { return job.training.threads; }, 1, 256,
      "Threads that compute. Another number rounds otherwise."));
  OrNull(b->Whole(
      "training.max_examples",
      [](Job & job, const std::string&) -> auto& { return job.training.max_examples; }, 0, kMax64,
      "Ends after the mini-batch that reaches it; null or 0: with the data."));
  OrNull(b->Whole(
      "validation.every_examples",
      [](Job & job, const std::string&) -> auto& { return job.validation.every_examples; }, 0,
      kMax64,
      "Validates so often, besides at each epoch's end and where training.max_examples ends the "
      "run; "
      "null or 0: only then."));
  b->Bytes(
      "memory.budget",
      [](Job & job, const std::string&) -> auto& { return job.memory.budget_bytes; },
      kLeastBudgetBytes, kMostBudgetBytes,
      "Of the whole process. The least that is accepted has room for the index of 250,000 rows; "
      "a run that outgrows its budget stops after a checkpoint and goes on with a larger one.");
}

void AddSsd(Builder* b) {
  const auto ssd = [](auto member) {
    return [member](Job & job, const std::string&) -> auto& { return job.ssd.*member; };
  };
  b->TextList("ssd.paths", ssd(&Job::Ssd::paths), {},
              "Folders for rows, one per disk; a shard lies on one of them. Empty: in output.");
  b->Bytes("ssd.quota", ssd(&Job::Ssd::quota_bytes), std::uint64_t{1} << 20, kMax64,
           "Bytes that the run may hold on disk: rows, checkpoints, `metrics.jsonl` and its small "
           "files, in blocks of 4 KiB. A warning tells where the disks have less.");
  b->WholeOrAuto(
      "ssd.shards", 1, 1024,
      [](Job* job, std::optional<std::uint64_t> shards) {
        job->ssd.shards_auto = !shards;
        job->ssd.shards = static_cast<int>(shards.value_or(1));
      },
      [](const Job& job) {
        return job.ssd.shards_auto ? std::nullopt : std::optional<std::uint64_t>(job.ssd.shards);
      },
      "Parts of each table on disk. Fixed for the life of a run. auto: one for each thread that "
      "pulls (pipeline.pull_threads), fewer where budget, quota or tables leave each little, and "
      "one for each of ssd.paths at least.");
  b->Whole("ssd.io_threads", ssd(&Job::Ssd::io_threads), 1, 64,
           "Threads that check and copy what was read, and build the index at a restart, at least "
           "one a shard; where io_uring is not used, four times as many read.");
  b->Word("ssd.backend", ssd(&Job::Ssd::backend), {"auto", "io_uring", "threads"},
          "How rows are read.");
  b->Bytes("ssd.file_size", ssd(&Job::Ssd::file_bytes), 64 << 10, kTiB,
           "Of a parameter file; larger ones cost compaction grain. Less where rows are short and "
           "stores many for memory.budget: the entries of files in the making take memory.");
  b->Choice("ssd.compaction", ssd(&Job::Ssd::compaction),
            std::vector<std::pair<std::string, CompactionPolicy>>{
                {"gain", CompactionPolicy::kGain},
                {"stale_share", CompactionPolicy::kStaleShare},
                {"model_size", CompactionPolicy::kModelSize}},
            "When files are rewritten: when all together are too stale, first those where it gains "
            "most; each when it is too stale; or when the run needs too much of its disks, those "
            "with the fewest newest rows. docs/decisions/compaction.md.");
  b->Number("ssd.stale_share", ssd(&Job::Ssd::stale_share), {0.05, 0.95},
            "A file is rewritten only when more of it is stale (compaction model_size: any that "
            "has stale rows, if need be). A table's files take up to 1 / (1 - stale_share) of its "
            "rows (0.3333: 1.5 times as much, 0.5: 2, 0.2: 1.25), and in each shard two files and "
            "twice a write of evicted rows more.");
  OnlyFor(b->Number("ssd.over_provisioning", ssd(&Job::Ssd::over_provisioning), {0, 1},
                    "Share of their capacity that the disks keep to themselves. Files are "
                    "rewritten when the run holds more than 0.85 + this of the disks or of the "
                    "quota, whichever is less."),
          "compaction model_size", [](const Job& job, const std::string&) {
            return job.ssd.compaction == CompactionPolicy::kModelSize;
          });
  b->Bytes("ssd.rated_writes", ssd(&Job::Ssd::rated_write_bytes), 0, kMax64,
           "What may be written to the disks of the rows in their life, as their makers say (TBW), "
           "all disks together. The summary then tells which share of it the run has used. 0: "
           "unknown. What NVMe drives count themselves, inspect shows.");
  b->Bool("ssd.direct", ssd(&Job::Ssd::direct), "Past the system's page cache.");
  b->Choice("ssd.read", ssd(&Job::Ssd::read),
            std::vector<std::pair<std::string, ReadMode>>{{"planned", ReadMode::kPlanned},
                                                          {"whole_file", ReadMode::kWholeFile}},
            "What a batch reads: what costs least, or every file that holds one of its rows, for "
            "comparison.");
  b->BytesOrAuto(
      "ssd.merge_gap", "", "32KiB",
      [](Job* job, const std::string&, std::optional<std::uint64_t> bytes) {
        job->ssd.merge_gap_bytes = bytes;
        return std::string();
      },
      [](const Job& job, const std::string&) { return job.ssd.merge_gap_bytes; },
      "Two rows of a file are read at once when no more bytes lie between them; "
      "auto: as many as cost what a request does on this disk, measured at the "
      "start.");
}

void AddQueue(Builder* b, const std::string& stage) {
  JobKey& key = b->Custom("pipeline.queues." + stage, "whole number or null", "1 to 64",
                          fmt::format("Batches in the channel after stage {}.", stage));
  key.default_note = "measured";
  key.set = [stage](const JobNode& node, Job* job, const std::string&) -> std::string {
    job->pipeline.queues.erase(stage);
    if (node.kind == JobNode::Kind::kNull) return "";
    const std::optional<std::uint64_t> value =
        node.kind == JobNode::Kind::kScalar ? ParseWhole(node.scalar) : std::nullopt;
    if (!value) return Expected("a whole number or null", node);
    if (*value < 1 || *value > 64) return fmt::format("is {}; legal: 1 to 64", *value);
    job->pipeline.queues[stage] = static_cast<int>(*value);
    return "";
  };
  key.print = [stage](const Job& job, const std::string&) -> std::optional<std::string> {
    const auto found = job.pipeline.queues.find(stage);
    if (found == job.pipeline.queues.end()) return std::nullopt;
    return std::to_string(found->second);
  };
}

void AddCache(Builder* b) {
  const auto has_lru = [](const Job& job, const std::string&) {
    return job.cache.eviction.type == EvictionType::kLruLfu;
  };
  const auto has_lfu = [](const Job& job, const std::string&) {
    return job.cache.eviction.type != EvictionType::kS3Fifo;
  };
  // A setting of an LFU alone asks for one.
  const auto asks_for_lfu = [](JobKey& key) -> JobKey& {
    key.set = [set = key.set](const JobNode& node, Job* job, const std::string& name) {
      if (!job->cache.policy_given) job->cache.eviction.type = EvictionType::kLruLfu;
      return set(node, job, name);
    };
    return key;
  };
  AndThen(
      b->Choice(
          "cache.policy",
          [](Job & job, const std::string&) -> auto& { return job.cache.eviction.type; },
          std::vector<std::pair<std::string, EvictionType>>{{"s3_fifo", EvictionType::kS3Fifo},
                                                            {"lru_lfu", EvictionType::kLruLfu},
                                                            {"pass_lfu", EvictionType::kPassLfu}},
          "Which rows leave memory first; docs/decisions/eviction.md."),
      [](Job& job, const std::string&) { job.cache.policy_given = true; });
  OnlyFor(asks_for_lfu(b->Number(
              "cache.lru_share",
              [](Job & job, const std::string&) -> auto& { return job.cache.eviction.lru_share; },
              {0, 1},
              "Share of the memory's rows that the LRU holds; the LFU holds the others. Without a "
              "cache.policy it asks for lru_lfu.")),
          "policy lru_lfu", has_lru);
  OnlyFor(asks_for_lfu(b->Number(
              "cache.half_life",
              [](Job & job, const std::string&) -> auto& { return job.cache.eviction.half_life; },
              {0, 1e6},
              "Visits for each row in memory after which the LFU's frequencies have halved: fewer "
              "follow a change sooner; 0: never. Without a cache.policy it asks for lru_lfu.")),
          "policy lru_lfu, pass_lfu", has_lfu);
  OnlyFor(
      b->Word(
          "cache.look_ahead",
          [](Job & job, const std::string&) -> auto& { return job.cache.look_ahead; },
          {"auto", "off"},
          "Whether the log is read ahead of training once rows no longer fit in memory, so that "
          "those that come again stay there; takes up to an eighth of the memory of rows, and "
          "1 GiB, and the time of a second reading. auto: where pipeline.depth is not 0."),
      "policy s3_fifo", [](const Job& job, const std::string&) {
        return job.cache.eviction.type == EvictionType::kS3Fifo;
      });
}

void AddRest(Builder* b) {
  b->Whole(
      "pipeline.depth", [](Job & job, const std::string&) -> auto& { return job.pipeline.depth; },
      0, 64, "Batches that are brought up ahead of training; 0: the stages run one after another.");
  b->WholeOrAuto(
      "pipeline.pull_threads", 1, 64,
      [](Job* job, std::optional<std::uint64_t> threads) {
        job->pipeline.pull_threads = static_cast<int>(threads.value_or(0));
      },
      [](const Job& job) {
        return job.pipeline.pull_threads == 0
                   ? std::nullopt
                   : std::optional<std::uint64_t>(job.pipeline.pull_threads);
      },
      "Threads that plan a batch, and that find, evict and load its rows side by side, each for an "
      "equal part of ssd.shards; for rows as many of them as ssd.shards can be divided by. auto: a "
      "quarter of the cores, up to 8, fewer where the other threads need them or the budget is "
      "short (docs/decisions/pull-threads.md).");
  for (const char* stage : {"read", "pull", "stage"}) AddQueue(b, stage);
  b->Whole(
      "checkpoint.every_batches",
      [](Job & job, const std::string&) -> auto& { return job.checkpoint.every_batches; }, 0,
      kMax64,
      "Of training.batch examples each, whatever the program adapts batches to; 0: at the end "
      "only.");
  b->Whole(
      "checkpoint.keep", [](Job & job, const std::string&) -> auto& { return job.checkpoint.keep; },
      1, 1000, "Checkpoints kept; under pressure of the quota older ones go first.");
  b->Number(
      "checkpoint.final_seconds",
      [](Job & job, const std::string&) -> auto& { return job.checkpoint.final_seconds; },
      {0, 86400},
      "What the checkpoint after a signal may take at the write rate that was seen; rows in memory "
      "that would take longer are written ahead. By group the blocks are read first, which takes "
      "about as long again.");
  OrNull(b->Whole(
      "metrics.every_examples",
      [](Job & job, const std::string&) -> auto& { return job.metrics.every_examples; }, 0, kMax64,
      "Interval of metrics.jsonl; null: 65536, whatever the batch."));
  b->TextList(
      "resume.accept", [](Job & job, const std::string&) -> auto& { return job.resume.accept; },
      {"data", "processor", "threads"},
      "What may differ from the run on --resume; with threads and processor the bits are then no "
      "longer an undisturbed run's, with data they are where the new files hold the same "
      "examples.");
}

}  // namespace

const std::vector<JobKey>& JobKeys() {
  static const std::vector<JobKey> keys = [] {
    Builder b;
    AddRun(&b);
    AddData(&b);
    AddTables(&b);
    AddNetwork(&b);
    AddTraining(&b);
    AddSsd(&b);
    AddCache(&b);
    AddRest(&b);
    return b.Take();
  }();
  return keys;
}

std::string LearningRateText(const LearningRate& rate) {
  std::string text = fmt::format("{}", rate.base);
  if (rate.warmup_steps != 0) text += fmt::format(" after {} steps of warm-up", rate.warmup_steps);
  if (rate.decay == LearningRate::Decay::kNone) return text;
  return text + fmt::format(", {} decay in {} steps to {}",
                            rate.decay == LearningRate::Decay::kLinear ? "linear" : "cosine",
                            rate.decay_steps, rate.final);
}

}  // namespace terrace
