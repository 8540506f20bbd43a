#include "terrace/io/testing/memory_file_system.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "terrace/base/rng.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/read_queue.h"

namespace terrace {
namespace {

constexpr std::size_t kBlockBytes = 4096;
// Versions of one block that a random crash can choose from besides the durable one; more only
// cost memory.
constexpr std::size_t kMaxVersions = 4;

using Block = std::array<std::byte, kBlockBytes>;
// Shared: the live, the durable and the versions between them are mostly the same block. Null: a
// hole, read as zeros.
using BlockPtr = std::shared_ptr<const Block>;

std::vector<std::string> Components(const std::string& path) {
  std::vector<std::string> parts;
  std::size_t start = 0;
  while (start <= path.size()) {
    std::size_t end = std::min(path.find('/', start), path.size());
    std::string part = path.substr(start, end - start);
    if (!part.empty() && part != ".") parts.push_back(std::move(part));
    start = end + 1;
  }
  return parts;
}

std::uint64_t BlocksFor(std::uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

}  // namespace

struct MemoryFileSystem::Node {
  bool is_directory = false;
  std::int64_t modified_micros = 0;
  // A folder's names, and what a crash would leave of them.
  std::map<std::string, NodePtr> names;
  std::map<std::string, NodePtr> durable_names;
  // A file's bytes, likewise; `versions` and `sizes` are what was between the two.
  std::uint64_t size = 0;
  std::uint64_t durable_size = 0;
  std::vector<BlockPtr> blocks;
  std::vector<BlockPtr> durable_blocks;
  std::map<std::size_t, std::vector<BlockPtr>> versions;
  std::vector<std::uint64_t> sizes;
  int holders = 0;  // Names and open files; the blocks are free at zero.
  int shared_locks = 0;
  bool exclusive_lock = false;

  std::uint64_t LiveBlocks() const {
    return static_cast<std::uint64_t>(std::count_if(
        blocks.begin(), blocks.end(), [](const BlockPtr& b) { return b != nullptr; }));
  }
  void Remember(std::size_t block) {
    std::vector<BlockPtr>& list = versions[block];
    if (list.size() == kMaxVersions) list.erase(list.begin());
    list.push_back(blocks[block]);
  }
  void MakeDurable() {
    durable_blocks = blocks;
    durable_size = size;
    versions.clear();
    sizes.clear();
  }
  // Chooses a length and the bytes of each block from what the disk may hold.
  void KeepSome(Rng* rng) {
    KeepSomeLength(rng);
    blocks = durable_blocks;
    blocks.resize(BlocksFor(size));
    for (const auto& [index, list] : versions) {
      if (index >= blocks.size()) continue;
      // A block whole, or each of its sectors by itself: a write may be torn between any two.
      const bool torn = rng->Below(2) == 0;
      const std::size_t choice = rng->Below(list.size() + 1);
      if (torn) {
        blocks[index] = TornBlock(blocks[index], list, rng);
      } else if (choice > 0) {
        blocks[index] = list[choice - 1];
      }
    }
    ClearTail();
  }
  // One that the file had, or, in the midst of a write that made it longer, one of whole sectors.
  void KeepSomeLength(Rng* rng) {
    sizes.push_back(durable_size);
    size = sizes[rng->Below(sizes.size())];
    const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
    if (rng->Below(2) == 0 || *least == *most) return;
    const std::uint64_t torn = (*least + rng->Below(*most - *least)) / kSectorBytes * kSectorBytes;
    size = std::max(*least, torn);
  }
  static BlockPtr TornBlock(const BlockPtr& durable, const std::vector<BlockPtr>& list, Rng* rng) {
    auto block = std::make_shared<Block>(Block{});
    for (std::size_t at = 0; at < kBlockBytes; at += kSectorBytes) {
      const std::size_t choice = rng->Below(list.size() + 1);
      const BlockPtr& from = choice > 0 ? list[choice - 1] : durable;
      if (from != nullptr) std::memcpy(block->data() + at, from->data() + at, kSectorBytes);
    }
    return block;
  }
  // Past the end a block is zero, so that a file that grows shows no old bytes. False: it was.
  bool ClearTail() {
    const std::size_t used = size % kBlockBytes;
    if (used == 0 || blocks.back() == nullptr) return false;
    auto block = std::make_shared<Block>(*blocks.back());
    std::memset(block->data() + used, 0, kBlockBytes - used);
    blocks.back() = std::move(block);
    return true;
  }
};

// One call that changed names; its parts are kept or lost together.
struct MemoryFileSystem::NameChange {
  struct Part {
    NodePtr folder;
    std::string name;
    NodePtr node;  // Null: removed.
  };
  std::vector<Part> parts;

  static void Apply(const Part& part) {
    if (part.node == nullptr) {
      part.folder->durable_names.erase(part.name);
    } else {
      part.folder->durable_names[part.name] = part.node;
    }
  }
};

class MemoryFile final : public File {
 public:
  MemoryFile(MemoryFileSystem* fs, MemoryFileSystem::NodePtr node, std::string path, OpenMode mode,
             std::uint64_t generation)
      : fs_(fs),
        path_(std::move(path)),
        aligned_(IsDirect(mode)),
        append_(mode == OpenMode::kAppend),
        read_only_(mode == OpenMode::kRead || mode == OpenMode::kReadDirect),
        generation_(generation),
        node_(std::move(node)) {}

  ~MemoryFile() override {
    MutexLock lock(&fs_->mu_);
    if (generation_ == fs_->generation_) fs_->Release(node_);
  }

  Result<std::size_t> ReadAt(std::uint64_t offset, std::span<std::byte> buffer) override {
    if (aligned_) CheckDirectAlignment(offset, buffer.data(), buffer.size(), kSectorBytes);
    MutexLock lock(&fs_->mu_);
    TERRACE_RETURN_IF_ERROR(CheckAlive());
    if (node_->is_directory) return ErrnoError(EISDIR, "reading", path_);
    if (offset >= node_->size) return std::size_t{0};
    std::size_t count = std::min<std::uint64_t>(buffer.size(), node_->size - offset);
    for (std::size_t done = 0; done < count;) {
      std::size_t start = (offset + done) % kBlockBytes;
      std::size_t length = std::min(count - done, kBlockBytes - start);
      const BlockPtr& block = node_->blocks[(offset + done) / kBlockBytes];
      if (block == nullptr) {
        std::memset(buffer.data() + done, 0, length);
      } else {
        std::memcpy(buffer.data() + done, block->data() + start, length);
      }
      done += length;
    }
    return count;
  }

  Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) override {
    if (aligned_) CheckDirectAlignment(offset, data.data(), data.size(), kDirectIoAlignment);
    TERRACE_RETURN_IF_ERROR(error_.Get());
    MutexLock lock(&fs_->mu_);
    TERRACE_RETURN_IF_ERROR(CheckAlive());
    if (read_only_) return error_.Set(ErrnoError(EBADF, "writing", path_));
    Status status = fs_->Write(node_.get(), append_ ? node_->size : offset, data, path_);
    return status.ok() ? status : error_.Set(std::move(status));
  }

  Status Sync() override {
    TERRACE_RETURN_IF_ERROR(error_.Get());
    MutexLock lock(&fs_->mu_);
    TERRACE_RETURN_IF_ERROR(CheckAlive());
    node_->MakeDurable();
    return OkStatus();
  }

  Result<std::uint64_t> Size() override {
    MutexLock lock(&fs_->mu_);
    TERRACE_RETURN_IF_ERROR(CheckAlive());
    return node_->size;
  }

  Status Truncate(std::uint64_t size) override {
    TERRACE_RETURN_IF_ERROR(error_.Get());
    MutexLock lock(&fs_->mu_);
    TERRACE_RETURN_IF_ERROR(CheckAlive());
    if (read_only_) return error_.Set(ErrnoError(EBADF, "cutting", path_));
    fs_->Resize(node_.get(), size);
    return OkStatus();
  }

  const std::string& path() const override { return path_; }
  std::size_t read_alignment() const override { return kSectorBytes; }

 private:
  Status CheckAlive() const TERRACE_REQUIRES(fs_->mu_) {
    if (generation_ == fs_->generation_) return OkStatus();
    return IoError(fmt::format("'{}' was open when the machine crashed", path_));
  }

  MemoryFileSystem* const fs_;
  const std::string path_;
  const bool aligned_;
  const bool append_;
  const bool read_only_;
  const std::uint64_t generation_;
  const MemoryFileSystem::NodePtr node_;
  StickyError error_;
};

class MemoryLock final : public FileLock {
 public:
  MemoryLock(MemoryFileSystem* fs, MemoryFileSystem::NodePtr node, bool exclusive,
             std::uint64_t generation)
      : fs_(fs), node_(std::move(node)), exclusive_(exclusive), generation_(generation) {}
  ~MemoryLock() override {
    MutexLock lock(&fs_->mu_);
    if (generation_ != fs_->generation_) return;
    if (exclusive_) {
      node_->exclusive_lock = false;
    } else {
      --node_->shared_locks;
    }
    fs_->Release(node_);
  }

 private:
  MemoryFileSystem* const fs_;
  const MemoryFileSystem::NodePtr node_;
  const bool exclusive_;
  const std::uint64_t generation_;
};

MemoryFileSystem::MemoryFileSystem(const Options& options)
    : clock_(options.clock), capacity_bytes_(options.capacity_bytes) {
  root_ = std::make_shared<Node>();
  root_->is_directory = true;
}

MemoryFileSystem::~MemoryFileSystem() = default;

Result<MemoryFileSystem::NodePtr> MemoryFileSystem::Find(const std::string& path) const {
  NodePtr node = root_;
  for (const std::string& part : Components(path)) {
    if (!node->is_directory) return ErrnoError(ENOTDIR, "finding", path);
    auto it = node->names.find(part);
    if (it == node->names.end()) return ErrnoError(ENOENT, "finding", path);
    node = it->second;
  }
  return node;
}

Result<MemoryFileSystem::NodePtr> MemoryFileSystem::FindParent(const std::string& path,
                                                               std::string* name) const {
  std::vector<std::string> parts = Components(path);
  if (parts.empty()) return ErrnoError(EBUSY, "changing", path);
  *name = parts.back();
  std::string folder;
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) folder += "/" + parts[i];
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(folder));
  if (!node->is_directory) return ErrnoError(ENOTDIR, "finding", path);
  return node;
}

// The live name only; null removes it.
void MemoryFileSystem::SetName(const NodePtr& folder, const std::string& name, NodePtr node) {
  auto it = folder->names.find(name);
  NodePtr old = it == folder->names.end() ? nullptr : it->second;
  if (node == nullptr) {
    folder->names.erase(it);
  } else {
    ++node->holders;
    folder->names[name] = std::move(node);
  }
  folder->modified_micros = clock_->WallMicros();
  if (old != nullptr) Release(old);
}

void MemoryFileSystem::LogChange(NameChange change) { changes_.push_back(std::move(change)); }

template <typename Taken>
void MemoryFileSystem::TakeChanges(Taken taken) {
  for (NameChange& change : changes_) std::erase_if(change.parts, taken);
  std::erase_if(changes_, [](const NameChange& change) { return change.parts.empty(); });
}

void MemoryFileSystem::Release(const NodePtr& node) {
  if (--node->holders == 0) used_bytes_ -= node->LiveBlocks() * kBlockBytes;
}

Status MemoryFileSystem::Write(Node* node, std::uint64_t offset, std::span<const std::byte> data,
                               const std::string& path) {
  if (data.empty()) return OkStatus();
  node->modified_micros = clock_->WallMicros();
  const std::uint64_t end = offset + data.size();
  if (node->blocks.size() < BlocksFor(end)) node->blocks.resize(BlocksFor(end));
  for (std::size_t done = 0; done < data.size();) {
    const std::size_t index = (offset + done) / kBlockBytes;
    const std::size_t start = (offset + done) % kBlockBytes;
    const std::size_t length = std::min(data.size() - done, kBlockBytes - start);
    if (node->blocks[index] == nullptr) {
      if (used_bytes_ + kBlockBytes > capacity_bytes_) {
        node->size = std::max(node->size, offset + done);
        node->blocks.resize(BlocksFor(node->size));
        return ErrnoError(
            ENOSPC, fmt::format("writing {} bytes at offset {} of", data.size(), offset), path);
      }
      used_bytes_ += kBlockBytes;
    }
    auto block = node->blocks[index] == nullptr ? std::make_shared<Block>(Block{})
                                                : std::make_shared<Block>(*node->blocks[index]);
    std::memcpy(block->data() + start, data.data() + done, length);
    node->blocks[index] = std::move(block);
    node->Remember(index);
    done += length;
  }
  if (end > node->size) {
    node->sizes.push_back(end);
    node->size = end;
  }
  return OkStatus();
}

void MemoryFileSystem::Resize(Node* node, std::uint64_t size) {
  node->modified_micros = clock_->WallMicros();
  std::uint64_t before = node->LiveBlocks();
  node->blocks.resize(BlocksFor(size));
  used_bytes_ -= (before - node->LiveBlocks()) * kBlockBytes;
  const bool cut = size < node->size;
  node->size = size;
  if (cut && node->ClearTail()) node->Remember(node->blocks.size() - 1);
  node->sizes.push_back(size);
}

Result<std::unique_ptr<File>> MemoryFileSystem::Open(const std::string& path, OpenMode mode) {
  MutexLock lock(&mu_);
  std::string name;
  Result<NodePtr> found = Find(path);
  NodePtr node;
  const bool creates = mode == OpenMode::kCreate || mode == OpenMode::kCreateDirect;
  if (found.ok()) {
    if (creates) return InvalidArgumentError(fmt::format("creating '{}': it exists already", path));
    node = *found;
    if (node->is_directory && mode == OpenMode::kAppend) return ErrnoError(EISDIR, "opening", path);
  } else {
    if (found.status().code() != StatusCode::kNotFound || (!creates && mode != OpenMode::kAppend)) {
      return found.status();
    }
    TERRACE_ASSIGN_OR_RETURN(NodePtr folder, FindParent(path, &name));
    node = std::make_shared<Node>();
    node->modified_micros = clock_->WallMicros();
    SetName(folder, name, node);
    LogChange({{{folder, name, node}}});
  }
  ++node->holders;
  return std::unique_ptr<File>(
      std::make_unique<MemoryFile>(this, std::move(node), path, mode, generation_));
}

Result<std::unique_ptr<ReadQueue>> MemoryFileSystem::NewReadQueue(const ReadQueueOptions& options) {
  TERRACE_RETURN_IF_ERROR(ValidateReadQueueOptions(options));
  if (options.backend == "io_uring") {
    return UnavailableError("io_uring cannot be used on files in memory; use auto or threads");
  }
  return NewThreadReadQueue(options.backend == "threads" ? options.threads : 1, "memory");
}

Status MemoryFileSystem::Rename(const std::string& from, const std::string& to) {
  MutexLock lock(&mu_);
  std::string from_name;
  std::string to_name;
  TERRACE_ASSIGN_OR_RETURN(NodePtr from_folder, FindParent(from, &from_name));
  TERRACE_ASSIGN_OR_RETURN(NodePtr to_folder, FindParent(to, &to_name));
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(from));
  const std::vector<std::string> above = Components(from);
  const std::vector<std::string> below = Components(to);
  if (below.size() > above.size() && std::equal(above.begin(), above.end(), below.begin())) {
    return ErrnoError(EINVAL, fmt::format("renaming '{}' to", from), to);
  }
  if (auto it = to_folder->names.find(to_name); it != to_folder->names.end()) {
    const NodePtr& old = it->second;
    if (old == node) return OkStatus();
    if (old->is_directory != node->is_directory) {
      return ErrnoError(old->is_directory ? EISDIR : ENOTDIR, fmt::format("renaming '{}' to", from),
                        to);
    }
    if (old->is_directory && !old->names.empty()) {
      return ErrnoError(ENOTEMPTY, fmt::format("renaming '{}' to", from), to);
    }
  }
  SetName(to_folder, to_name, node);
  SetName(from_folder, from_name, nullptr);
  LogChange({{{to_folder, to_name, node}, {from_folder, from_name, nullptr}}});
  return OkStatus();
}

Status MemoryFileSystem::Remove(const std::string& path) {
  MutexLock lock(&mu_);
  std::string name;
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  TERRACE_ASSIGN_OR_RETURN(NodePtr folder, FindParent(path, &name));
  if (node->is_directory) return ErrnoError(EISDIR, "removing", path);
  SetName(folder, name, nullptr);
  LogChange({{{folder, name, nullptr}}});
  return OkStatus();
}

Status MemoryFileSystem::RemoveDirectory(const std::string& path) {
  MutexLock lock(&mu_);
  std::string name;
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  TERRACE_ASSIGN_OR_RETURN(NodePtr folder, FindParent(path, &name));
  if (!node->is_directory) return ErrnoError(ENOTDIR, "removing folder", path);
  if (!node->names.empty()) return ErrnoError(ENOTEMPTY, "removing folder", path);
  SetName(folder, name, nullptr);
  LogChange({{{folder, name, nullptr}}});
  return OkStatus();
}

Status MemoryFileSystem::MakeDirectories(const std::string& path) {
  MutexLock lock(&mu_);
  NodePtr node = root_;
  for (const std::string& part : Components(path)) {
    auto it = node->names.find(part);
    if (it == node->names.end()) {
      auto made = std::make_shared<Node>();
      made->is_directory = true;
      made->modified_micros = clock_->WallMicros();
      SetName(node, part, made);
      // Durable at once, whatever was to become of an older one of that name.
      TakeChanges([&](const NameChange::Part& change) {
        return change.folder == node && change.name == part;
      });
      node->durable_names[part] = made;
      node = std::move(made);
      continue;
    }
    node = it->second;
    if (!node->is_directory) return ErrnoError(ENOTDIR, "making folder", path);
  }
  return OkStatus();
}

Status MemoryFileSystem::SyncDirectory(const std::string& path) {
  MutexLock lock(&mu_);
  TERRACE_ASSIGN_OR_RETURN(NodePtr folder, Find(path));
  if (!folder->is_directory) return ErrnoError(ENOTDIR, "syncing folder", path);
  TakeChanges([&](const NameChange::Part& part) {
    if (part.folder != folder) return false;
    NameChange::Apply(part);
    return true;
  });
  return OkStatus();
}

FileInfo MemoryFileSystem::Info(const std::string& name, const Node& node) const {
  FileInfo info;
  info.name = name;
  info.size = node.size;
  info.disk_bytes = node.LiveBlocks() * kBlockBytes;
  info.is_directory = node.is_directory;
  info.modified_micros = node.modified_micros;
  return info;
}

Result<std::vector<FileInfo>> MemoryFileSystem::List(const std::string& path) {
  MutexLock lock(&mu_);
  TERRACE_ASSIGN_OR_RETURN(NodePtr folder, Find(path));
  if (!folder->is_directory) return ErrnoError(ENOTDIR, "listing", path);
  std::vector<FileInfo> infos;
  for (const auto& [name, node] : folder->names) infos.push_back(Info(name, *node));
  return infos;
}

Result<FileInfo> MemoryFileSystem::Stat(const std::string& path) {
  MutexLock lock(&mu_);
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  std::vector<std::string> parts = Components(path);
  return Info(parts.empty() ? "/" : parts.back(), *node);
}

Result<DiskSpace> MemoryFileSystem::Space(const std::string& path) {
  MutexLock lock(&mu_);
  TERRACE_RETURN_IF_ERROR(Find(path).status());
  return DiskSpace{0, capacity_bytes_,
                   capacity_bytes_ > used_bytes_ ? capacity_bytes_ - used_bytes_ : 0};
}

Result<std::unique_ptr<FileLock>> MemoryFileSystem::Lock(const std::string& path, bool exclusive) {
  MutexLock lock(&mu_);
  TERRACE_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  if (node->exclusive_lock || (exclusive && node->shared_locks > 0)) {
    return UnavailableError(fmt::format("'{}' is locked by another process", path));
  }
  if (exclusive) {
    node->exclusive_lock = true;
  } else {
    ++node->shared_locks;
  }
  ++node->holders;
  return std::unique_ptr<FileLock>(
      std::make_unique<MemoryLock>(this, std::move(node), exclusive, generation_));
}

void MemoryFileSystem::Crash(std::uint64_t seed, CrashPolicy policy) {
  MutexLock lock(&mu_);
  ++generation_;
  Rng rng(HashCombine(seed, generation_));
  const bool keep_all = policy == CrashPolicy::kKeepAll;
  const bool random = policy == CrashPolicy::kRandom;
  for (const NameChange& change : changes_) {
    if (!keep_all && !(random && rng.Below(2) == 0)) continue;
    for (const NameChange::Part& part : change.parts) NameChange::Apply(part);
  }
  changes_.clear();
  used_bytes_ = 0;
  std::set<Node*> seen;
  Recover(root_.get(), policy, &rng, &seen);
}

void MemoryFileSystem::Recover(Node* node, CrashPolicy policy, Rng* rng, std::set<Node*>* seen) {
  if (!seen->insert(node).second) {
    ++node->holders;  // A second name: a rename between folders of which one half was kept.
    return;
  }
  node->holders = 1;
  node->shared_locks = 0;
  node->exclusive_lock = false;
  if (policy == CrashPolicy::kLoseUnsynced) {
    node->blocks = node->durable_blocks;
    node->size = node->durable_size;
  } else if (policy == CrashPolicy::kRandom) {
    node->KeepSome(rng);
  }
  node->MakeDurable();
  used_bytes_ += node->LiveBlocks() * kBlockBytes;
  node->names = node->durable_names;
  for (const auto& [name, child] : node->names) Recover(child.get(), policy, rng, seen);
}

void MemoryFileSystem::set_capacity_bytes(std::uint64_t bytes) {
  MutexLock lock(&mu_);
  capacity_bytes_ = bytes;
}

std::uint64_t MemoryFileSystem::used_bytes() const {
  MutexLock lock(&mu_);
  return used_bytes_;
}

}  // namespace terrace
