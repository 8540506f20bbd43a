// ExpiryRule: which rows a table has forgotten. A pure function of a row's own statistics and of a
// position in the stream of examples, so that it does not matter when, or whether, the bytes of an
// expired row leave memory and disk; docs/expiry.md has the formulas. Threads: constant after
// construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace terrace {

struct ExpirySpec {
  std::uint64_t every_examples = 0;  // From one expiry point to the next; 0: rows never expire.
  std::uint64_t after = 0;           // Examples since the row was last seen; 0: no limit.
  double below = 0;                  // Score; 0: no limit.
  // Of the score: what a show without click and what a click is worth, and what is left of both
  // after each expiry point.
  double show_weight = 0.1;
  double click_weight = 1.0;
  double decay = 0.98;
  bool on() const { return every_examples > 0; }
  // Statistics shrink from point to point.
  bool decays() const { return on() && below > 0 && decay < 1; }
};
inline constexpr double kLeastExpireBelow = 1e-6;  // Of `below`, unless it is 0.

// The last bytes of a row: show, click, last_seen (docs/formats/row.md).
inline constexpr std::uint32_t kStatisticsBytes = 16;

class ExpiryRule {
 public:
  ExpiryRule() = default;  // Nothing ever expires.
  explicit ExpiryRule(const ExpirySpec& spec);

  const ExpirySpec& spec() const { return spec_; }
  bool on() const { return spec_.on(); }
  // Expiry points that have taken effect at a position: examples trained, at a mini-batch's end.
  std::uint64_t Points(std::uint64_t position) const {
    return on() ? position / spec_.every_examples : 0;
  }

  // Whether the row of these statistics, trained before, has expired at a position. Once true, true
  // at every later position, as long as the row is not trained.
  bool Expired(const std::byte* statistics, std::uint64_t position) const {
    return Expired(statistics, position, spec_.below);
  }
  // Stricter: every older version of the row has then expired as well. What is dropped by it and
  // comes back in an older version, because a store has recovered, is expired still.
  bool Droppable(const std::byte* statistics, std::uint64_t position) const {
    return Expired(statistics, position, drop_below_);
  }

  // Brings show and click of a row to the points that have passed since it was last seen. The row
  // is about to be trained and has not expired.
  void Decay(std::byte* statistics, std::uint64_t position) const;

 private:
  bool Expired(const std::byte* statistics, std::uint64_t position, double below) const;
  // decay^periods, never rising with periods, in whatever way it is rounded.
  double Power(std::uint64_t periods) const;

  ExpirySpec spec_;
  double drop_below_ = 0;
  std::vector<double> powers_;  // (periods) 0 behind the last one.
};

// Whether a stored row counts at a position: never trained and expired ones do not.
bool CountsAt(const ExpiryRule& rule, std::span<const std::byte> row, std::uint64_t position);

}  // namespace terrace
