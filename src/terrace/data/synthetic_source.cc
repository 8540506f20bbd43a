#include "terrace/data/synthetic_source.h"

#include <algorithm>
#include <utility>

#include "terrace/base/rng.h"
#include "terrace/data/file_list.h"

namespace terrace {

Result<std::unique_ptr<ExampleSource>> SyntheticSource::Open(const DataOptions& options) {
  TERRACE_ASSIGN_OR_RETURN(const IntegerEncoding integers, ParseIntegerEncoding(options.integers));
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ClickLogGenerator> generator,
                           ClickLogGenerator::Create(ClickLogSpecOf(options)));
  return std::unique_ptr<ExampleSource>(
      new SyntheticSource(options, integers, std::move(generator)));
}

SyntheticSource::SyntheticSource(const DataOptions& options, IntegerEncoding integers,
                                 std::unique_ptr<ClickLogGenerator> generator)
    : options_(options),
      generator_(std::move(generator)),
      encoder_(integers, options.missing == "key", options.categorical_slots) {}

Status SyntheticSource::Seek(const DataCursor& cursor) {
  TERRACE_CHECK(given_ == 0);
  if (cursor.epoch < options_.epochs && cursor.example_in_epoch > options_.rows)
    return InvalidArgumentError("the position to go on from is example " +
                                std::to_string(cursor.example_in_epoch) + " of an epoch of " +
                                std::to_string(options_.rows) + " rows");
  cursor_ = DataCursor{};
  cursor_.epoch = cursor.epoch;
  cursor_.example_in_epoch = cursor.example_in_epoch;
  cursor_.examples = cursor.examples;
  return OkStatus();
}

std::uint64_t SyntheticSource::RowOf(std::uint64_t example) {
  if (options_.shuffle != "examples") return example;
  const std::uint64_t window = example / options_.shuffle_window;
  const std::uint64_t first = window * options_.shuffle_window;
  if (order_.empty() || window != window_ || cursor_.epoch != order_epoch_) {
    const auto size = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(options_.shuffle_window, options_.rows - first));
    order_ = EpochOrder(size, true, HashCombine(options_.seed, HashName("examples")), cursor_.epoch,
                        window);
    window_ = window;
    order_epoch_ = cursor_.epoch;
  }
  return first + order_[static_cast<std::size_t>(example - first)];
}

Result<std::optional<Batch>> SyntheticSource::NextIn(std::uint32_t examples,
                                                     std::uint32_t minibatch, Batch old) {
  TERRACE_CHECK(minibatch > 0 && examples >= minibatch && examples % minibatch == 0);
  if (cursor_.epoch >= options_.epochs) return std::optional<Batch>();
  Batch batch = encoder_.NewBatch(examples, std::move(old));
  batch.cursors.reserve(examples / minibatch + 1);  // One more where an epoch ends.
  batch.first_example = cursor_.examples;
  const std::uint64_t wanted = std::min<std::uint64_t>(
      examples - cursor_.example_in_epoch % minibatch, options_.rows - cursor_.example_in_epoch);
  for (std::uint64_t i = 0; i < wanted; ++i) {
    if (i % 1024 == 0 && cancelled_.load(std::memory_order_relaxed))
      return AbortedError("reading was cancelled");
    const std::uint64_t row = options_.first_row + RowOf(cursor_.example_in_epoch);
    generator_->MakeRow(row, &row_);
    encoder_.Append(row_.label, row_.integers.data(), row_.categories.data(), &batch);
    batch.origin_file.push_back(0);
    batch.origin_line.push_back(row);
    ++cursor_.example_in_epoch;
    ++cursor_.examples;
    if (cursor_.example_in_epoch == options_.rows) {
      cursor_.example_in_epoch = 0;
      ++cursor_.epoch;
      batch.ends_epoch = true;
      batch.cursors.push_back(cursor_);
    } else if (cursor_.example_in_epoch % minibatch == 0) {
      batch.cursors.push_back(cursor_);
    }
  }
  given_ += batch.examples;
  const double total = static_cast<double>(options_.rows) * static_cast<double>(options_.epochs);
  MutexLock lock(&mu_);
  stats_.examples = given_;
  stats_.lines = given_;
  stats_.progress = (static_cast<double>(cursor_.epoch) * static_cast<double>(options_.rows) +
                     static_cast<double>(cursor_.example_in_epoch)) /
                    total;
  return std::optional<Batch>(std::move(batch));
}

std::uint64_t SyntheticSource::BytesOf(const DataOptions& options) {
  return options.shuffle == "examples"
             ? 4 * std::min<std::uint64_t>(options.shuffle_window, options.rows)
             : 0;
}

SourceStats SyntheticSource::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

std::string SyntheticSource::IdentityText() const {
  std::string text = "format synthetic; " + generator_->IdentityText() + "; rows " +
                     std::to_string(options_.first_row) + "+" + std::to_string(options_.rows) +
                     "; epochs " + std::to_string(options_.epochs) + "; shuffle " +
                     options_.shuffle;
  if (options_.shuffle == "examples")
    text += "; seed " + std::to_string(options_.seed) + "; window " +
            std::to_string(options_.shuffle_window);
  return text + "; integers " + options_.integers + "; missing " + options_.missing;
}

}  // namespace terrace
