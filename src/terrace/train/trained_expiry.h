// TrainedExpiry: what the tiers of a table ask of its expiry rule, as far as was trained. A row
// that has expired there is gone in every checkpoint from then on, unless training makes it anew;
// older checkpoints keep their own files. Threads: any; SetPosition from one. Borrows the schema.
#pragma once

#include <atomic>
#include <cstdint>

#include "terrace/store/store.h"
#include "terrace/table/row_schema.h"

namespace terrace {

class TrainedExpiry final : public RowExpiry {
 public:
  explicit TrainedExpiry(const RowSchema* schema) : schema_(schema) {}

  // Examples trained. Whether an expiry point has passed.
  bool SetPosition(std::uint64_t examples) {
    const std::uint64_t before = position_.exchange(examples, std::memory_order_relaxed);
    return schema_->expiry().Points(before) != schema_->expiry().Points(examples);
  }
  std::uint64_t points() const override { return schema_->expiry().Points(position()); }
  bool MayGo(const std::byte* row) const override {
    return schema_->expiry().Droppable(row + schema_->statistics_offset(), position());
  }

 private:
  // Relaxed: an older position only lets fewer rows go.
  std::uint64_t position() const { return position_.load(std::memory_order_relaxed); }

  const RowSchema* const schema_;
  std::atomic<std::uint64_t> position_{0};
};

}  // namespace terrace
