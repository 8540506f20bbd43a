// MergeHeap: which of several sorted sources stands at the least hash. A binary heap over (hash,
// source); equal hashes come out in the order of their sources.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace terrace {

class MergeHeap {
 public:
  struct Item {
    std::uint64_t hash;
    std::uint32_t source;
  };

  bool empty() const { return items_.empty(); }
  const Item& top() const { return items_.front(); }
  void Push(std::uint64_t hash, std::uint32_t source) {
    items_.push_back({hash, source});
    for (std::size_t at = items_.size() - 1; at > 0;) {
      const std::size_t parent = (at - 1) / 2;
      if (!Less(items_[at], items_[parent])) break;
      std::swap(items_[at], items_[parent]);
      at = parent;
    }
  }
  // The top source moved on to `hash`. REQUIRES: !empty().
  void ReplaceTop(std::uint64_t hash) {
    items_.front().hash = hash;
    SiftDown();
  }
  void PopTop() {
    items_.front() = items_.back();
    items_.pop_back();
    if (!items_.empty()) SiftDown();
  }

 private:
  static bool Less(const Item& a, const Item& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.source < b.source;
  }
  void SiftDown() {
    const Item moving = items_.front();
    std::size_t at = 0;
    while (true) {
      std::size_t child = 2 * at + 1;
      if (child >= items_.size()) break;
      if (child + 1 < items_.size() && Less(items_[child + 1], items_[child])) ++child;
      if (!Less(items_[child], moving)) break;
      items_[at] = items_[child];
      at = child;
    }
    items_[at] = moving;
  }

  std::vector<Item> items_;
};

}  // namespace terrace
