// The back ends of ReadQueue. Internal to io/.
#pragma once

#include <memory>

#include "terrace/io/file_system.h"

namespace terrace {

Status ValidateReadQueueOptions(const ReadQueueOptions& options);

// Calls ReadAt of each file, on `threads` threads of its own; with one, Wait does it on the
// caller's. `name` must be a literal.
std::unique_ptr<ReadQueue> NewThreadReadQueue(int threads, std::string_view name = "threads");

// kUnavailable: the kernel has no io_uring or forbids it; the message says which.
Result<std::unique_ptr<ReadQueue>> NewUringReadQueue(int depth, std::span<std::byte> buffer);

// The first request that failed, in the order given.
Status FirstError(std::span<const ReadRequest> requests);

// One request by File::ReadAt.
void RunOne(ReadRequest* request);

}  // namespace terrace
