#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// So many files of less than a quarter of the aimed size are merged: else flushes of few rows would
// leave ever more files.
constexpr std::size_t kMostSmallFiles = 16;
constexpr std::size_t kMostInputs = 64;

}  // namespace

std::uint64_t StoreImpl::LeastFileRows() const {
  return options_.read_only ? ~std::uint64_t{0} : (rows_per_file_ + 3) / 4;
}

FileUse StoreImpl::UseOf(const StoredFile& file) const {
  const bool deletions_too = files_gone_ >= file.deletions_due;
  return {file.info.rows, file.stale + (deletions_too ? file.live_deletions : 0)};
}

void StoreImpl::Pace(std::uint64_t bytes) {
  if (options_.background_compaction) pace_.Pass(bytes);
}

FileUse StoreImpl::StoreUse(bool as_rewritten) const {
  FileUse use;
  for (const FilePtr& file : slots_) {
    if (file == nullptr || !(file->live || file->publishing)) continue;
    FileUse of_file = UseOf(*file);
    if (!file->live) {
      // An output has the rows that the index leads to by now; the others count as stale.
      of_file = {of_file.rows - file->stale, 0};
    } else if (as_rewritten && file->compacting) {
      of_file = {of_file.rows - of_file.reclaimable, 0};
    }
    use.rows += of_file.rows;
    use.reclaimable += of_file.reclaimable;
  }
  return use;
}

void StoreImpl::AwaitCompaction(std::uint64_t rows) {
  const auto slack = static_cast<double>(2 * rows_per_file_ + rows);
  MutexLock lock(&mu_);
  // What is staged can't be taken back, and is in use as soon as it is published.
  const auto above = [&]() TERRACE_REQUIRES(mu_) {
    return rule_.RowsAbove(UseWithStaged(StoreUse(/*as_rewritten=*/false))) > slack;
  };
  if (!above()) return;
  ScopedTimer timer(clock_, &compaction_wait_nanos_);
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  // A quota that leaves no room for a rewrite, or an error, is met by the write itself.
  while (above() && poison_.ok() && background_.ok() &&
         (compaction_time_.active > 0 || CompactionDue())) {
    compacted_.Wait(&mu_);
  }
}

void StoreImpl::TellCompactable() {
  if (options_.compaction != CompactionPolicy::kModelSize || quota_ == nullptr) return;
  DiskQuota::Compactable now;
  for (const FilePtr& file : retired_) now.apart += file->info.bytes;
  for (const FilePtr& file : slots_) {
    if (file != nullptr && file->compacting) now.apart += file->info.bytes;
  }
  for (const Spare& spare : spares_) now.apart += spare.bytes;
  // Of rewrites for which there is no room nothing can be hoped.
  if (no_room_at_ != room_made_) {
    now.stale =
        StoreUse(/*as_rewritten=*/true).reclaimable * (layout_.record_bytes + kKeyEntryBytes);
  }
  quota_->ChangeCompactable(told_, now);
  told_ = now;
}

StoreImpl::RunUse StoreImpl::UseOfRun() {
  if (options_.compaction != CompactionPolicy::kModelSize) return {};
  TellCompactable();
  const DiskQuota::Compactable all = quota_->compactable();
  const std::uint64_t used = quota_->used();
  // What the others told may have gone meanwhile.
  return {used - std::min(used, all.apart) + keep_free_.load(std::memory_order_relaxed), all.stale};
}

std::vector<FilePtr> StoreImpl::DueFiles(bool freeing_only) {
  std::vector<std::pair<double, FilePtr>> worth;
  std::vector<FilePtr> small;
  const FileUse store = StoreUse(/*as_rewritten=*/true);
  const RunUse run = UseOfRun();
  const bool any = !freeing_only && rule_.TakesAny(run.bytes, run.stale_bytes);
  const auto is_worth = [&](const FileUse& use) {
    return rule_.IsWorth(use) || (any && use.reclaimable > 0);
  };
  for (const FilePtr& file : slots_) {
    if (file == nullptr || !file->live || file->publishing || file->compacting) continue;
    if (freeing_only && file->named_by > 0) continue;
    const FileUse use = UseOf(*file);
    if (is_worth(use)) {
      worth.emplace_back(rule_.Rank(use, sequence_ - file->info.max_sequence + 1), file);
    }
    if (file->info.rows < LeastFileRows()) small.push_back(file);
  }
  std::vector<FilePtr> due;
  // For space at once, what the policy would leave for later too.
  if (!worth.empty() && (freeing_only || rule_.Due(UseWithStaged(store), run.bytes))) {
    std::sort(worth.begin(), worth.end(), [](const auto& x, const auto& y) {
      return x.first != y.first ? x.first > y.first : x.second->info.id < y.second->info.id;
    });
    for (auto& [rank, file] : worth) due.push_back(std::move(file));
  }
  if (small.size() > kMostSmallFiles) {
    std::sort(small.begin(), small.end(), [](const FilePtr& a, const FilePtr& b) {
      return a->info.rows != b->info.rows ? a->info.rows < b->info.rows : a->info.id < b->info.id;
    });
    const bool has_worth = !due.empty();
    for (FilePtr& file : small) {
      if (!has_worth || !is_worth(UseOf(*file))) due.push_back(std::move(file));
    }
  }
  return due;
}

void StoreImpl::PickInputs(bool freeing_only, Compaction* round) {
  // One round rewrites about one file's worth, so that little space is needed beside the inputs.
  std::uint64_t newest_rows = 0;
  for (const FilePtr& file : DueFiles(freeing_only)) {
    const std::uint64_t rows = file->info.rows - file->stale;
    if (!round->inputs.empty() &&
        (newest_rows + rows > rows_per_file_ || round->inputs.size() == kMostInputs)) {
      break;
    }
    newest_rows += rows;
    round->inputs.push_back(file);
  }
  std::sort(round->inputs.begin(), round->inputs.end(),
            [](const FilePtr& a, const FilePtr& b) { return a->info.id < b->info.id; });
  round->rows_left = newest_rows;
  if (newest_rows > 0) {
    round->files = (newest_rows + rows_per_file_ - 1) / rows_per_file_;
    for (std::uint64_t f = 0; f < round->files; ++f) {
      round->space += layout_.FileBytes(std::min(rows_per_file_, newest_rows - f * rows_per_file_));
    }
  }
  for (const FilePtr& file : round->inputs) {
    file->compacting = true;
    file->stale_at_pick = file->stale;
    round->frees &= file->named_by == 0;
  }
}

void StoreImpl::CompactLoop(Compactor* compactor) {
  const bool first = compactor == &compactors_[0];
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!stopping_.load(std::memory_order_relaxed) &&
             (!background_.ok() || !poison_.ok() ||
              !((first && (GoneToRemove() || SweepDue())) || CompactionDue()))) {
        compaction_wanted_.Wait(&mu_);
      }
      if (stopping_.load(std::memory_order_relaxed)) return;
    }
    Status status = RemoveGone();
    if (status.ok()) {
      MutexLock compact(&compactor->mu);
      bool done = false;
      if (first) status = SweepNext(compactor, &done);
      if (status.ok()) status = CompactRound(compactor, RoundFor::kBackground, &done);
    }
    if (status.ok() || status.code() == StatusCode::kAborted) continue;
    LogText(LogLevel::kError, status.ToString());
    MutexLock lock(&mu_);
    if (background_.ok()) background_ = status;
    compacted_.NotifyAll();
  }
}

Status StoreImpl::CompactNow() {
  TERRACE_RETURN_IF_ERROR(CheckWritable());
  return CompactAll();
}

Status StoreImpl::CompactAll() {
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  Compactor* const compactor = &compactors_[0];
  MutexLock compact(&compactor->mu);
  for (bool more = true; more;) {
    // Also of what another round has written meanwhile.
    for (bool swept = true; swept;) TERRACE_RETURN_IF_ERROR(SweepNext(compactor, &swept));
    TERRACE_RETURN_IF_ERROR(RemoveGone());
    TERRACE_RETURN_IF_ERROR(CompactRound(compactor, RoundFor::kCaller, &more));
  }
  return OkStatus();
}

Status StoreImpl::CompactUntil(RoundFor whom, const std::function<bool()>& enough) {
  ScopedTimer timer(clock_, &compaction_wait_nanos_);
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  Compactor* const compactor = &compactors_[0];
  MutexLock compact(&compactor->mu);
  // No sweep: it takes too long.
  for (bool more = true;;) {
    TERRACE_RETURN_IF_ERROR(RemoveAllGone());
    if (enough() || !more) return OkStatus();
    TERRACE_RETURN_IF_ERROR(CompactRound(compactor, whom, &more));
  }
}

Status StoreImpl::MakeRoom(std::uint64_t bytes) {
  return CompactUntil(RoundFor::kSpace, [&] { return quota_->HasFree(bytes); });
}

Status StoreImpl::MergeFiles(std::uint64_t files) {
  return CompactUntil(RoundFor::kCaller, [&] { return quota_->HasFreeFiles(files); });
}

bool StoreImpl::AwaitOtherRound(RoundFor whom) {
  if (whom == RoundFor::kBackground || compaction_time_.active == 0) return false;
  const std::uint64_t ended = rounds_ended_;
  while (rounds_ended_ == ended) compacted_.Wait(&mu_);
  return true;
}

Status StoreImpl::CompactRound(Compactor* compactor, RoundFor whom, bool* more) {
  *more = false;
  if (whom != RoundFor::kBackground) TERRACE_RETURN_IF_ERROR(CheckWritable());
  Compaction round;
  {
    MutexLock lock(&mu_);
    if (!poison_.ok()) return OkStatus();
    PickInputs(/*freeing_only=*/whom == RoundFor::kSpace, &round);
    if (round.inputs.empty()) {
      *more = AwaitOtherRound(whom);
      return OkStatus();
    }
    round.alone = compaction_time_.active == 0;
    round.room_made = room_made_;
    compaction_time_.Begin(clock_);
  }
  SyncPoint::Hit("store.compact.picked");
  const bool reserved = ReserveRound(whom, &round);
  Status status;
  if (reserved) status = Rewrite(compactor, &round);
  const bool done = reserved && status.ok();
  // Before another round finds its files.
  if (!status.ok() && status.code() != StatusCode::kAborted) {
    status = Poison(status.WithContext(fmt::format("compacting {}", options_.directory)));
  }
  ReleaseFiles(&round);
  if (done) {
    SyncPoint::Hit("store.compact.before_remove");
    compactions_.fetch_add(1, std::memory_order_relaxed);
    status = RemoveGone();
  }
  if (round.has_rewrite_room) quota_->GiveRewriteRoom();
  if (reserved) {
    quota_->EndRewrite(&*reclaimer_);
    // Also in other stores: what was reserved and not used, what was left alone for its sake.
    quota_->TellRoomMade();
  } else {
    quota_->TellRefused();
  }
  bool idle;
  {
    MutexLock lock(&mu_);
    compaction_time_.End(clock_);
    ++rounds_ended_;
    compacted_.NotifyAll();
    if (!reserved) {
      no_room_at_ = round.room_made;  // Not a failure: it goes on when room is made.
      TellCompactable();
    }
    // A round beside another one, which may have ended by now, left more space alone.
    *more = done || (!reserved && (room_made_ != round.room_made || AwaitOtherRound(whom) ||
                                   (whom != RoundFor::kBackground && !round.alone)));
    idle = !CompactionDue();
  }
  if (idle) {
    compactor->keys = KeyEntries();
    compactor->from = std::vector<Place>();
  }
  return status;
}

bool StoreImpl::ReserveRound(RoundFor whom, Compaction* round) {
  // What frees no space at once must leave the last checkpoint its share, and so must each round
  // but one: a checkpoint counts on the space of one.
  const bool waits = whom != RoundFor::kBackground;
  if (!BeginRewrite(round->files, waits)) return false;
  round->has_rewrite_room = round->frees && quota_->TryTakeRewriteRoom(&*reclaimer_);
  const auto take = [&] {
    const bool takes_of_it = round->has_rewrite_room;
    return TakeSpace(round->space, takes_of_it ? 0 : keep_free_.load(std::memory_order_relaxed))
        .ok();
  };
  if (take()) return true;
  if (round->frees && !round->has_rewrite_room && waits) {
    quota_->AwaitRewriteRoom(&*reclaimer_);
    round->has_rewrite_room = true;
    if (take()) return true;
  }
  ReleaseSlots(round->files);
  quota_->EndRewrite(&*reclaimer_);
  return false;
}

bool StoreImpl::BeginRewrite(std::uint64_t files, bool waits) {
  if (!quota_->BeginRewrite(&*reclaimer_, files, waits)) return false;
  MutexLock lock(&mu_);
  counted_slots_ += files;
  reserved_slots_ += files;
  if (used_slots() <= index_->max_slots()) return true;
  reserved_slots_ -= files;
  CountFiles();
  quota_->EndRewrite(&*reclaimer_);
  return false;
}

void StoreImpl::ReleaseFiles(Compaction* round) {
  MutexLock lock(&mu_);
  for (const FilePtr& file : round->outputs) {
    file->publishing = false;
    file->live = true;
    if (file->stale == file->info.rows) Retire(file.get());
  }
  for (const FilePtr& file : round->inputs) {
    if (file->live && file->stale == file->info.rows) Retire(file.get());
    file->compacting = false;
  }
  round->outputs.clear();
  round->inputs.clear();
}

bool StoreImpl::GoneToRemove() const {
  for (const FilePtr& file : retired_) {
    if (file->named_by == 0 && IsUnread(file)) return true;
  }
  return false;
}

}  // namespace terrace
