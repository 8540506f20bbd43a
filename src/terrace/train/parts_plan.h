// Into how many parts the work of bringing up rows is cut: a thread for each part of a table's
// cache, and the shards whose rows a part has. Threads: pure functions, but for the machine and the
// run that they look at.
#pragma once

#include <cstdint>

#include "terrace/io/file_system.h"
#include "terrace/train/job.h"
#include "terrace/train/trainer.h"

namespace terrace {

// Threads that pull a working set together, on a machine with so many cores: as the job says, or a
// quarter of the cores, which keeps up with training on the others; no more than leave each part of
// the pipeline cores of its own (binding_plan.h), and than the budget has room for. 1 where the
// stages run one after another.
int PullThreads(const Job& job, int cores);
// Of the shards of a new run, where the job leaves them to the program: as many as give each thread
// that pulls a part, as far as budget, quota and tables leave each enough; as many on each disk.
// pulling: PullThreads.
int ShardsOfNewRun(const Job& job, int pulling);
// The job with what it leaves to the machine: the threads that pull, and the shards of the run that
// it goes on with or begins. From a thread that is not bound yet.
Job WithParts(FileSystem* fs, const Job& job, RunMode mode);

// Parts of each table's cache: a thread that pulls for each, or fewer by which the shards are
// divided.
std::uint32_t CacheParts(const Job& job);

}  // namespace terrace
