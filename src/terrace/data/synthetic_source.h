// SyntheticSource: the rows of a ClickLogGenerator as a stream of examples, exactly those that
// reading the written log gives. Threads: as ExampleSource; none of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"

namespace terrace {

class SyntheticSource final : public ExampleSource {
 public:
  // As OpenSource. REQUIRES: options are checked.
  static Result<std::unique_ptr<ExampleSource>> Open(const DataOptions& options);

  const DataSchema& schema() const override { return encoder_.schema(); }
  Result<std::optional<Batch>> NextIn(std::uint32_t examples, std::uint32_t minibatch,
                                      Batch old) override;
  Status Seek(const DataCursor& cursor) override;
  std::span<const InputFile> files() const override { return {}; }
  std::uint64_t MemoryBytes() const override { return BytesOf(options_); }
  // MemoryBytes of one with these options.
  static std::uint64_t BytesOf(const DataOptions& options);
  SourceStats stats() const override;
  std::string IdentityText() const override;
  // Relaxed: Next looks again and again.
  void Cancel() override { cancelled_.store(true, std::memory_order_relaxed); }

 private:
  SyntheticSource(const DataOptions& options, IntegerEncoding integers,
                  std::unique_ptr<ClickLogGenerator> generator);
  // The number within the epoch's rows of its example `example`.
  std::uint64_t RowOf(std::uint64_t example);

  const DataOptions options_;
  const std::unique_ptr<ClickLogGenerator> generator_;
  const ExampleEncoder encoder_;

  DataCursor cursor_;
  std::uint64_t given_ = 0;
  ClickLogRow row_;
  // The order inside window window_ of epoch order_epoch_.
  std::vector<std::uint32_t> order_;
  std::uint64_t order_epoch_ = 0;
  std::uint64_t window_ = 0;

  std::atomic<bool> cancelled_{false};
  mutable Mutex mu_;
  SourceStats stats_ TERRACE_GUARDED_BY(mu_);
};

}  // namespace terrace
