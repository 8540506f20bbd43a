#include "terrace/pipeline/testing/aibox_cache.h"

#include <utility>

namespace terrace {

Score AiboxCache::Run(const Trace& trace, std::uint64_t sets) {
  Scorer scorer(trace);
  Stopwatch watch;
  std::vector<bool> hits;
  for (std::size_t b = 0; b < trace.batches.size(); ++b) {
    const auto& keys = trace.batches[b];
    hits.assign(keys.size(), false);
    watch.Start();
    if (b >= sets) {
      for (const std::uint32_t key : trace.batches[b - sets]) Release(key);
    }
    for (std::size_t i = 0; i < keys.size(); ++i) hits[i] = Pull(keys[i]);
    watch.Stop();
    for (std::size_t i = 0; i < keys.size(); ++i) scorer.Visit(b, keys[i], hits[i]);
    most_rows_ = std::max(most_rows_, rows_);
  }
  return scorer.score(watch.seconds());
}

std::uint32_t AiboxCache::Unlink(std::uint32_t* link, std::uint32_t key) {
  while (*link != kNone && nodes_[*link].key != key) link = &nodes_[*link].next;
  const std::uint32_t node = *link;
  if (node != kNone) *link = nodes_[node].next;
  return node;
}

bool AiboxCache::Pull(std::uint32_t key) {
  Bucket& bucket = BucketOf(key);
  std::uint32_t node = Unlink(&bucket.lru, key);
  if (node == kNone) {
    node = Unlink(&bucket.lfu, key);
    if (node != kNone) --bucket.lfu_nodes;
  }
  const bool hit = node != kNone;
  if (!hit) {
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(nodes_.size()));
      nodes_.emplace_back();
    }
    node = free_.back();
    free_.pop_back();
    nodes_[node] = {.key = key, .frequency = 0, .pins = 0, .next = kNone};
    ++rows_;
  }
  ++nodes_[node].frequency;
  ++nodes_[node].pins;
  nodes_[node].next = bucket.lru;
  bucket.lru = node;
  return hit;
}

void AiboxCache::Release(std::uint32_t key) {
  Bucket& bucket = BucketOf(key);
  std::uint32_t* link = &bucket.lru;
  while (nodes_[*link].key != key) link = &nodes_[*link].next;
  const std::uint32_t node = *link;
  if (--nodes_[node].pins > 0) return;
  *link = nodes_[node].next;
  std::uint32_t* place = &bucket.lfu;
  while (*place != kNone && nodes_[*place].frequency > nodes_[node].frequency) {
    place = &nodes_[*place].next;
  }
  nodes_[node].next = *place;
  *place = node;
  if (++bucket.lfu_nodes > max_lfu_) Flush(&bucket);
}

void AiboxCache::Flush(Bucket* bucket) {
  const std::uint64_t keep = bucket->lfu_nodes - std::min(bucket->lfu_nodes, kFlushStep);
  std::uint32_t* link = &bucket->lfu;
  for (std::uint64_t i = 0; i < keep; ++i) link = &nodes_[*link].next;
  for (std::uint32_t node = std::exchange(*link, kNone); node != kNone; node = nodes_[node].next) {
    free_.push_back(node);
    --rows_;
  }
  bucket->lfu_nodes = keep;
}

}  // namespace terrace
