// RowSchema: what one row of a table holds and where. A row is one fixed-length record that is
// never torn apart: weights by segment, then optimizer state by segment, then statistics.
// docs/formats/row.md gives the bytes. Threads: constant after construction.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/status.h"
#include "terrace/table/expiry.h"

namespace terrace {

enum class StorageType : std::uint8_t { kFloat32 = 0, kUint64 = 1 };
// How the deltas of two workers to one field become one.
enum class MergeRule : std::uint8_t {
  kOptimizer = 0,  // The optimizer, applied to the sum of the gradients.
  kAdd = 1,
  kMax = 2,
};

struct InitializerSpec {
  enum class Type : std::uint8_t { kZeros, kConstant, kUniform, kNormal };
  Type type = Type::kUniform;
  float scale =
      0.01f;  // kUniform: [-scale, scale); kNormal: standard deviation; kConstant: the value.
};

struct SparseOptimizerSpec {
  enum class Type : std::uint8_t { kSgd, kAdaGrad, kAdaGradRow, kAdam, kFtrl };
  Type type = Type::kAdaGrad;
  float initial_accumulator = 0.0f;                        // AdaGrad.
  float epsilon = 1e-8f;                                   // AdaGrad, Adam.
  float beta1 = 0.9f, beta2 = 0.999f;                      // Adam.
  float l1 = 0.0f, l2 = 0.0f, beta = 1.0f, alpha = 0.05f;  // FTRL; its learning rate is alpha.
};

// Floats of state that the optimizer keeps for a segment of `dim` weights.
std::uint32_t OptimizerStateFloats(const SparseOptimizerSpec& spec, std::uint32_t dim);

struct SegmentSpec {
  std::string name;  // "embedding", "wide".
  std::uint32_t dim = 0;
  InitializerSpec initializer;
  SparseOptimizerSpec optimizer;
  float l2 = 0.0f;  // Added to the gradient as l2 * w when a row is touched (not for FTRL, which
                    // has its own).
};

// When a key gets a row: after so many shows, that is examples which hold it, as a filter of a
// fixed size counts them (admission_filter.h).
struct AdmissionSpec {
  std::uint32_t after = 0;         // Shows; 0 and 1: with the first one, and nothing is counted.
  std::uint64_t filter_bytes = 0;  // Of the filter's cells; whole blocks of 64 bytes are used.
  bool on() const { return after > 1; }
};
inline constexpr std::uint32_t kMaxAdmitAfter = 65535;  // A cell of the filter has 16 bits at most.
inline constexpr std::uint64_t kLeastAdmitFilterBytes = 4096;
// kInvalidArgument, as Create below.
Status CheckExpiry(const ExpirySpec& spec);

// The names a segment may have: pooled by slot into the network's input block, or one weight per
// key summed over the example.
inline constexpr std::string_view kEmbeddingSegment = "embedding";
inline constexpr std::string_view kWideSegment = "wide";

struct Segment : SegmentSpec {
  std::uint64_t stream = 0;         // Of its random numbers: hash of the table's and its own name.
  std::uint32_t weight_offset = 0;  // Bytes from the row's start.
  std::uint32_t state_offset = 0;   // Likewise.
  std::uint32_t state_floats = 0;
};

// One field of the row as the format names it.
struct RowField {
  std::string name;          // "embedding.weight", "embedding.accumulator", "show", ...
  std::uint32_t offset = 0;  // Bytes.
  std::uint32_t count = 0;   // Values.
  StorageType type = StorageType::kFloat32;
  MergeRule merge = MergeRule::kOptimizer;
};

class RowSchema {
 public:
  // kInvalidArgument: no segment, a name that is unknown or given twice, a zero or huge dimension,
  // a wide segment of more than one weight, FTRL with an initializer other than zeros or with the
  // table's l2, settings of an optimizer that could divide by zero, an admission that no filter can
  // count, an expiry without a reason to expire or with weights that could let a score rise.
  static Result<RowSchema> Create(std::string table, std::vector<SegmentSpec> segments,
                                  const AdmissionSpec& admission = {},
                                  const ExpirySpec& expiry = {});

  const std::string& table() const { return table_; }
  std::span<const Segment> segments() const { return segments_; }
  const Segment* FindSegment(std::string_view name) const;
  // Bytes of a row, a multiple of 8.
  std::uint32_t row_bytes() const { return row_bytes_; }
  std::uint32_t weight_floats() const {
    return weight_floats_;
  }  // All segments' weights lie side by side at offset 0.
  // Of show, click and last_seen together, the row's last kStatisticsBytes.
  std::uint32_t statistics_offset() const { return show_offset_; }
  std::uint32_t show_offset() const { return show_offset_; }    // float
  std::uint32_t click_offset() const { return click_offset_; }  // float
  std::uint32_t last_seen_offset() const {
    return last_seen_offset_;
  }  // uint64, count of examples trained
  std::span<const RowField> fields() const { return fields_; }
  const AdmissionSpec& admission() const { return admission_; }
  const ExpiryRule& expiry() const { return expiry_; }
  // Canonical text: two schemas with equal text have equal rows. Part of what identifies a model.
  std::string ToText() const;

  // Writes the row that `key` starts with: a pure function of (seed, table, key). row: row_bytes().
  void InitializeRow(std::uint64_t seed, Key key, std::byte* row) const;

 private:
  RowSchema() = default;
  std::string table_;
  std::vector<Segment> segments_;
  std::vector<RowField> fields_;
  AdmissionSpec admission_;
  ExpiryRule expiry_;
  std::uint32_t row_bytes_ = 0;
  std::uint32_t weight_floats_ = 0;
  std::uint32_t show_offset_ = 0;
  std::uint32_t click_offset_ = 0;
  std::uint32_t last_seen_offset_ = 0;
};

}  // namespace terrace
