#include "terrace/table/row_schema.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "terrace/base/rng.h"
#include "terrace/table/initializer.h"

namespace terrace {
namespace {

constexpr std::uint32_t kMaxSegmentDim = 4096;  // Weights; rows stay within one I/O block or so.

// The shortest text that reads back as the same number.
template <typename Number>
std::string FloatText(Number value) {
  char buffer[32];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  TERRACE_CHECK(error == std::errc());
  return std::string(buffer, end);
}

std::string InitializerText(const InitializerSpec& spec) {
  switch (spec.type) {
    case InitializerSpec::Type::kZeros:
      return "zeros";
    case InitializerSpec::Type::kConstant:
      return "constant(" + FloatText(spec.scale) + ")";
    case InitializerSpec::Type::kUniform:
      return "uniform(" + FloatText(spec.scale) + ")";
    case InitializerSpec::Type::kNormal:
      return "normal(" + FloatText(spec.scale) + ")";
  }
  return "";
}

std::string OptimizerText(const SparseOptimizerSpec& spec) {
  using Type = SparseOptimizerSpec::Type;
  switch (spec.type) {
    case Type::kSgd:
      return "sgd";
    case Type::kAdaGrad:
    case Type::kAdaGradRow:
      return std::string(spec.type == Type::kAdaGrad ? "adagrad" : "adagrad_row") +
             "(epsilon=" + FloatText(spec.epsilon) +
             ",initial_accumulator=" + FloatText(spec.initial_accumulator) + ")";
    case Type::kAdam:
      return "adam(beta1=" + FloatText(spec.beta1) + ",beta2=" + FloatText(spec.beta2) +
             ",epsilon=" + FloatText(spec.epsilon) + ")";
    case Type::kFtrl:
      return "ftrl(alpha=" + FloatText(spec.alpha) + ",beta=" + FloatText(spec.beta) +
             ",l1=" + FloatText(spec.l1) + ",l2=" + FloatText(spec.l2) + ")";
  }
  return "";
}

struct StatePart {
  std::string_view name;
  std::uint32_t count = 0;
};

// The parts of a segment's optimizer state in the order of the row.
std::vector<StatePart> StateParts(const SparseOptimizerSpec& spec, std::uint32_t dim) {
  using Type = SparseOptimizerSpec::Type;
  switch (spec.type) {
    case Type::kSgd:
      return {};
    case Type::kAdaGrad:
      return {{"accumulator", dim}};
    case Type::kAdaGradRow:
      return {{"accumulator", 1}};
    case Type::kAdam:
      return {{"m", dim}, {"v", dim}, {"step", 1}};
    case Type::kFtrl:
      return {{"z", dim}, {"n", dim}};
  }
  return {};
}

bool NonNegative(float value) { return std::isfinite(value) && value >= 0.0f; }

Status CheckOptimizer(const SparseOptimizerSpec& spec) {
  using Type = SparseOptimizerSpec::Type;
  switch (spec.type) {
    case Type::kSgd:
      return OkStatus();
    case Type::kAdaGrad:
    case Type::kAdaGradRow:
      if (!NonNegative(spec.epsilon) || !NonNegative(spec.initial_accumulator) ||
          spec.epsilon + spec.initial_accumulator == 0.0f) {
        return InvalidArgumentError(
            "adagrad: epsilon and initial_accumulator must be finite and at least 0, and not both "
            "0 (the first step would divide by 0)");
      }
      return OkStatus();
    case Type::kAdam:
      if (!(spec.beta1 >= 0.0f && spec.beta1 < 1.0f && spec.beta2 >= 0.0f && spec.beta2 < 1.0f)) {
        return InvalidArgumentError("adam: beta1 and beta2 must lie in [0, 1)");
      }
      if (!NonNegative(spec.epsilon) || spec.epsilon == 0.0f) {
        return InvalidArgumentError("adam: epsilon must be finite and above 0");
      }
      return OkStatus();
    case Type::kFtrl:
      if (!NonNegative(spec.alpha) || spec.alpha == 0.0f) {
        return InvalidArgumentError("ftrl: alpha must be finite and above 0");
      }
      if (!NonNegative(spec.beta) || !NonNegative(spec.l1) || !NonNegative(spec.l2)) {
        return InvalidArgumentError("ftrl: beta, l1 and l2 must be finite and at least 0");
      }
      if (spec.beta + spec.l2 == 0.0f) {
        return InvalidArgumentError(
            "ftrl: beta and l2 must not both be 0 (a tiny first gradient would divide by 0)");
      }
      return OkStatus();
  }
  return InvalidArgumentError("unknown optimizer");
}

Status CheckSegment(const SegmentSpec& spec) {
  if (spec.name != kEmbeddingSegment && spec.name != kWideSegment) {
    return InvalidArgumentError("a segment is named \"embedding\" or \"wide\"");
  }
  if (spec.dim == 0 || spec.dim > kMaxSegmentDim) {
    return InvalidArgumentError("dimension " + std::to_string(spec.dim) + " is outside 1.." +
                                std::to_string(kMaxSegmentDim));
  }
  if (spec.name == kWideSegment && spec.dim != 1) {
    return InvalidArgumentError("the wide segment holds one weight; its dimension is " +
                                std::to_string(spec.dim));
  }
  if (!std::isfinite(spec.initializer.scale)) {
    return InvalidArgumentError("the initializer's scale is not finite");
  }
  if (spec.initializer.type != InitializerSpec::Type::kConstant && spec.initializer.scale < 0.0f) {
    return InvalidArgumentError("the initializer's scale is negative");
  }
  if (!NonNegative(spec.l2)) {
    return InvalidArgumentError("l2 must be finite and at least 0");
  }
  TERRACE_RETURN_IF_ERROR(CheckOptimizer(spec.optimizer));
  if (spec.optimizer.type == SparseOptimizerSpec::Type::kFtrl) {
    if (spec.initializer.type != InitializerSpec::Type::kZeros) {
      return InvalidArgumentError(
          "ftrl starts from z = n = 0, which means zero weights: set its initializer to zeros");
    }
    if (spec.l2 != 0.0f) {
      return InvalidArgumentError("ftrl has its own l2: set that one and leave the table's at 0");
    }
  }
  return OkStatus();
}

}  // namespace

Status CheckExpiry(const ExpirySpec& spec) {
  if (!spec.on()) return OkStatus();
  if (spec.after == 0 && spec.below == 0) {
    return InvalidArgumentError("expiry: neither an age nor a score lets a row expire");
  }
  if (!(spec.below == 0 || (spec.below >= kLeastExpireBelow && std::isfinite(spec.below)))) {
    return InvalidArgumentError("expiry: a score below which rows expire is 0 or 1e-6 or more");
  }
  if (!(spec.show_weight >= 0 && spec.click_weight >= spec.show_weight &&
        std::isfinite(spec.click_weight))) {
    return InvalidArgumentError("expiry: 0 <= show_weight <= click_weight must hold");
  }
  if (!(spec.decay >= 0 && spec.decay <= 1)) {
    return InvalidArgumentError("expiry: decay must lie in [0, 1]");
  }
  return OkStatus();
}

std::uint32_t OptimizerStateFloats(const SparseOptimizerSpec& spec, std::uint32_t dim) {
  std::uint32_t floats = 0;
  for (const StatePart& part : StateParts(spec, dim)) floats += part.count;
  return floats;
}

Result<RowSchema> RowSchema::Create(std::string table, std::vector<SegmentSpec> segments,
                                    const AdmissionSpec& admission, const ExpirySpec& expiry) {
  const std::string context = "table \"" + table + "\"";
  if (table.empty()) return InvalidArgumentError("a table needs a name");
  if (segments.empty()) {
    return InvalidArgumentError("a row needs at least one segment").WithContext(context);
  }
  if (admission.on() &&
      (admission.after > kMaxAdmitAfter || admission.filter_bytes < kLeastAdmitFilterBytes)) {
    return InvalidArgumentError("admission after " + std::to_string(admission.after) +
                                " shows with a filter of " +
                                std::to_string(admission.filter_bytes) + " bytes: at most " +
                                std::to_string(kMaxAdmitAfter) + " shows and at least " +
                                std::to_string(kLeastAdmitFilterBytes) + " bytes are possible")
        .WithContext(context);
  }
  if (const Status status = CheckExpiry(expiry); !status.ok()) return status.WithContext(context);
  RowSchema schema;
  schema.table_ = std::move(table);
  schema.admission_ = admission;
  schema.expiry_ = ExpiryRule(expiry);
  const std::uint64_t table_hash = HashName(schema.table_);
  std::uint32_t offset = 0;
  for (SegmentSpec& spec : segments) {
    const Status status = CheckSegment(spec);
    if (!status.ok()) {
      return status.WithContext("segment \"" + spec.name + "\"").WithContext(context);
    }
    if (schema.FindSegment(spec.name) != nullptr) {
      return InvalidArgumentError("segment \"" + spec.name + "\" is named twice")
          .WithContext(context);
    }
    Segment segment;
    static_cast<SegmentSpec&>(segment) = std::move(spec);
    segment.weight_offset = offset;
    segment.stream = HashCombine(table_hash, HashName(segment.name));
    offset += segment.dim * 4;
    schema.fields_.push_back({segment.name + ".weight", segment.weight_offset, segment.dim});
    schema.segments_.push_back(std::move(segment));
  }
  schema.weight_floats_ = offset / 4;
  for (Segment& segment : schema.segments_) {
    segment.state_offset = offset;
    for (const StatePart& part : StateParts(segment.optimizer, segment.dim)) {
      schema.fields_.push_back({segment.name + "." + std::string(part.name), offset, part.count});
      offset += part.count * 4;
      segment.state_floats += part.count;
    }
  }
  offset = (offset + 7) / 8 * 8;
  schema.show_offset_ = offset;
  schema.click_offset_ = offset + 4;
  schema.last_seen_offset_ = offset + 8;
  schema.row_bytes_ = offset + 16;
  schema.fields_.push_back(
      {"show", schema.show_offset_, 1, StorageType::kFloat32, MergeRule::kAdd});
  schema.fields_.push_back(
      {"click", schema.click_offset_, 1, StorageType::kFloat32, MergeRule::kAdd});
  schema.fields_.push_back(
      {"last_seen", schema.last_seen_offset_, 1, StorageType::kUint64, MergeRule::kMax});
  return schema;
}

const Segment* RowSchema::FindSegment(std::string_view name) const {
  for (const Segment& segment : segments_) {
    if (segment.name == name) return &segment;
  }
  return nullptr;
}

std::string RowSchema::ToText() const {
  std::string text = "row 1 table " + std::to_string(table_.size()) + ":" + table_ + " bytes " +
                     std::to_string(row_bytes_) + "\n";
  for (const Segment& segment : segments_) {
    text += "segment " + segment.name + " dim " + std::to_string(segment.dim) + " initializer " +
            InitializerText(segment.initializer) + " optimizer " +
            OptimizerText(segment.optimizer) + " l2 " + FloatText(segment.l2) + "\n";
  }
  for (const RowField& field : fields_) {
    static constexpr std::string_view kMergeNames[] = {"optimizer", "add", "max"};
    text += "field " + field.name + " offset " + std::to_string(field.offset) + " count " +
            std::to_string(field.count) +
            (field.type == StorageType::kFloat32 ? " float32 " : " uint64 ") +
            std::string(kMergeNames[static_cast<int>(field.merge)]) + "\n";
  }
  if (admission_.on()) {
    text += "admission after " + std::to_string(admission_.after) + " filter " +
            std::to_string(admission_.filter_bytes) + "\n";
  }
  if (expiry_.on()) {
    const ExpirySpec& expiry = expiry_.spec();
    text += "expiry every " + std::to_string(expiry.every_examples) + " after " +
            std::to_string(expiry.after) + " below " + FloatText(expiry.below) + " show_weight " +
            FloatText(expiry.show_weight) + " click_weight " + FloatText(expiry.click_weight) +
            " decay " + FloatText(expiry.decay) + "\n";
  }
  return text;
}

void RowSchema::InitializeRow(std::uint64_t seed, Key key, std::byte* row) const {
  const std::uint32_t weight_bytes = weight_floats_ * 4;
  std::memset(row + weight_bytes, 0, row_bytes_ - weight_bytes);
  for (const Segment& segment : segments_) {
    float* weight = reinterpret_cast<float*>(row + segment.weight_offset);
    const std::uint64_t state = HashCombine(HashCombine(seed, segment.stream), key);
    FillInitialWeights(segment.initializer, state, segment.dim, weight);
    const SparseOptimizerSpec& optimizer = segment.optimizer;
    if (optimizer.type == SparseOptimizerSpec::Type::kAdaGrad ||
        optimizer.type == SparseOptimizerSpec::Type::kAdaGradRow) {
      float* accumulator = reinterpret_cast<float*>(row + segment.state_offset);
      for (std::uint32_t i = 0; i < segment.state_floats; ++i) {
        accumulator[i] = optimizer.initial_accumulator;
      }
    }
  }
}

}  // namespace terrace
