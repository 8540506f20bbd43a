#include "terrace/train/summary.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/file_system.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/train/metrics_file.h"
#include "terrace/train/metrics_scrub.h"

namespace terrace {
namespace {

using testing::HasSubstr;

ClickMetricsResult SampleResult() {
  ClickMetricsResult result;
  result.examples = 1234567;
  result.auc = 0.75;
  result.auc_error = 0.0001;
  result.logloss = 0.1;
  result.ne = 0.8;
  result.calibration = std::nan("");
  result.mean_label = 0.25;
  result.mean_prediction = 0.26;
  return result;
}

RunSummary SampleSummary() {
  RunSummary summary;
  summary.finished = true;
  summary.checkpoint = 12;
  summary.epochs = 2;
  summary.steps = 3000;
  summary.examples = ~std::uint64_t{0};
  summary.process_examples = 1000;
  summary.bad_lines = 4;
  summary.seconds = 61;
  summary.examples_per_second = 16393.4;
  summary.progressive = SampleResult();
  summary.validation = SampleResult();
  summary.rows = 5;
  summary.model_bytes = 6;
  summary.memory = {7, 8, 9.5};
  summary.cache = {90, 10, 12};
  summary.ssd = {13, 14, 15, 16, 17, 22, 23.5, 24.5, {25, 26, 13, 27.5, 10}, 1000};
  summary.stages.read = {1, 2, 3, 4};
  summary.stages.train = {10, 0, 0, 20};
  summary.stages.write_back = {0.5, 0, 0, 0.25};
  return summary;
}

TEST(Summary, ComesBackEqual) {
  const std::string text = SummaryToJson(SampleSummary());
  Result<RunSummary> back = SummaryFromJson(text);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(SummaryToJson(*back), text);
  EXPECT_EQ(back->examples, ~std::uint64_t{0});
  EXPECT_TRUE(std::isnan(back->progressive.calibration));
  RunSummary with = SampleSummary();
  with.admission = {18, 0.5};
  with.expiry = {19, 20, 21};
  with.binding = "none: 2 cores";
  with.steps_by_rows = 77;
  with.cpu_seconds = 78.5;
  back = SummaryFromJson(SummaryToJson(with));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(SummaryToJson(*back), SummaryToJson(with));
  EXPECT_THAT(SummaryTable(with, "r"), HasSubstr("18 shows of keys without a row yet; 50.0 %"));
  EXPECT_THAT(SummaryTable(with, "r"), HasSubstr("19 rows begun anew, 20 not written back, 21"));
  EXPECT_THAT(SummaryTable(with, "r"), HasSubstr("binding         none: 2 cores"));
  RunSummary without = SampleSummary();
  without.validation.reset();
  EXPECT_FALSE(SummaryFromJson(SummaryToJson(without))->validation.has_value());
}

TEST(Summary, GoldenFileIsWrittenTheSame) {
  Result<std::string> golden = ReadFileToString(
      FileSystem::Posix(), std::string(TERRACE_TESTDATA) + "/summary_v2.golden.json");
  ASSERT_TRUE(golden.ok()) << golden.status().ToString();
  EXPECT_EQ(*golden, SummaryToJson(SampleSummary()));
}

TEST(Summary, TheFirstVersionIsReadWithoutTheRunsWear) {
  Result<std::string> golden = ReadFileToString(
      FileSystem::Posix(), std::string(TERRACE_TESTDATA) + "/summary_v1.golden.json");
  ASSERT_TRUE(golden.ok()) << golden.status().ToString();
  Result<RunSummary> summary = SummaryFromJson(*golden);
  ASSERT_TRUE(summary.ok()) << summary.status().ToString();
  EXPECT_EQ(summary->ssd.checkpoint_only_bytes, 17u);
  EXPECT_EQ(summary->ssd.run.write_bytes, 0u);
}

TEST(SsdWear, GoesOnFromWhatACheckpointSays) {
  SsdWear wear{100, 20, 10, 1.5, 30};
  EXPECT_EQ(wear.WriteAmplification(), 100.0 / 30);
  EXPECT_EQ(SsdWear().WriteAmplification(), 0);
  const Result<SsdWear> back = SsdWearOf("{\"ssd\":" + SsdWearToJson(wear) + "}");
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  wear += *back;
  EXPECT_EQ(wear.write_bytes, 200u);
  EXPECT_EQ(wear.rows_written, 40u);
  EXPECT_EQ(wear.rows_compacted, 20u);
  EXPECT_EQ(wear.compaction_seconds, 3);
  EXPECT_EQ(wear.wanted_bytes, 60u) << "it follows from the bytes and the amplification";
  EXPECT_EQ(SsdWearOf("{\"ssd\":" + SsdWearToJson(SsdWear()) + "}")->wanted_bytes, 0u);
  EXPECT_EQ(SsdWearOf("{}")->write_bytes, 0u);
  EXPECT_EQ(SsdWearOf("[]").status().code(), StatusCode::kCorruption);
  EXPECT_EQ(SsdWearOf("{\"ssd\":{}}").status().code(), StatusCode::kCorruption);
  EXPECT_THAT(SsdWearText(wear, 0), HasSubstr("200 B written at write amplification 3.33"));
  EXPECT_EQ(SsdWearText(wear, 0).find("rated"), std::string::npos);
  EXPECT_THAT(SsdWearText(wear, 400),
              HasSubstr("; 50 % of the 400 B that the disks are rated for"));
}

TEST(Summary, ForeignTextIsRefused) {
  EXPECT_EQ(SummaryFromJson("{").status().code(), StatusCode::kCorruption);
  EXPECT_EQ(SummaryFromJson("{}").status().code(), StatusCode::kCorruption);
  EXPECT_EQ(SummaryFromJson("{\"format_version\": 3}").status().code(),
            StatusCode::kInvalidArgument);
  // Each field is asked for.
  const nlohmann::json whole = nlohmann::json::parse(SummaryToJson(SampleSummary()));
  for (const auto& [name, value] : whole.items()) {
    nlohmann::json part = whole;
    part.erase(name);
    EXPECT_FALSE(SummaryFromJson(part.dump()).ok()) << name;
  }
}

TEST(Metrics, GoldenLinesAreWrittenTheSame) {
  IntervalRecord interval;
  interval.epoch = 1;
  interval.examples = 2;
  interval.steps = 3;
  interval.window = SampleResult();
  interval.performance.channels = {{"read", 2, 1, 4096}};
  interval.performance.stages.pull.busy_seconds = 0.5;
  ValidationRecord validation;
  validation.examples = 5;
  validation.result = SampleResult();
  const std::string lines = IntervalToJson(interval) + "\n" + ValidationToJson(validation) + "\n";
  Result<std::string> golden = ReadFileToString(
      FileSystem::Posix(), std::string(TERRACE_TESTDATA) + "/metrics_v2.golden.jsonl");
  ASSERT_TRUE(golden.ok()) << golden.status().ToString();
  EXPECT_EQ(*golden, lines);
}

TEST(Metrics, DrivesStandWhereOneTellsItsWear) {
  IntervalRecord interval;
  const auto ssd = [&] {
    return nlohmann::json::parse(IntervalToJson(interval))["performance"]["ssd"];
  };
  EXPECT_FALSE(ssd().contains("drives"));
  DriveHealth drive;
  drive.device = "nvme0n1";
  drive.model = "M";
  drive.health.percentage_used = 7;
  drive.health.available_spare_percent = 99;
  drive.health.written_bytes = 512e6;
  interval.performance.ssd.drives = {drive};
  ASSERT_EQ(ssd()["drives"].size(), 1u);
  EXPECT_EQ(ssd()["drives"][0], nlohmann::json::parse(DriveToJson(drive)));
  EXPECT_EQ(ssd()["drives"][0]["percentage_used"], 7);
  EXPECT_EQ(ssd()["drives"][0]["written_bytes"], 512e6);
  // What it calls itself may be anything.
  drive.model = "caf\xe9";
  interval.performance.ssd.drives = {drive};
  EXPECT_EQ(ssd()["drives"][0]["model"], "caf\xef\xbf\xbd");
  EXPECT_EQ(nlohmann::json::parse(DriveToJson(drive))["model"], "caf\xef\xbf\xbd");
}

TEST(Metrics, LinesOfEachVersionAreSound) {
  for (const char* version : {"v1", "v2"}) {
    const std::string path =
        std::string(TERRACE_TESTDATA) + "/metrics_" + version + ".golden.jsonl";
    const Result<std::string> lines = ReadFileToString(FileSystem::Posix(), path);
    ASSERT_TRUE(lines.ok()) << lines.status().ToString();
    const Result<std::vector<DamagedMetrics>> damage =
        ScrubMetrics(FileSystem::Posix(), path, lines->size(), NewerLines::kRefused);
    ASSERT_TRUE(damage.ok()) << damage.status().ToString();
    EXPECT_TRUE(damage->empty()) << version;
  }
}

// A disk gives up a block: its lines, and those that reach into it, are lost, and no other.
TEST(Metrics, LinesThatTheDiskDoesNotReadAreDamaged) {
  constexpr std::uint64_t kBlock = 4096, kBlocks = 4;
  const std::string path = "/metrics.jsonl";
  std::string text;
  while (text.size() < kBlock * kBlocks - 1000) {
    text += fmt::format(R"({{"format_version":2,"kind":"interval","at":{}}})", text.size()) + "\n";
  }
  for (std::uint64_t bad = 0; bad <= kBlocks; ++bad) {
    SCOPED_TRACE(bad == kBlocks ? "all" : "block " + std::to_string(bad));
    MemoryFileSystem memory;
    io_testing::Replace(&memory, path, text);
    FaultRule whole, block;
    whole.operation = block.operation = FileOperation::kRead;
    whole.nth = 1;
    block.nth = bad == kBlocks ? 1 : 2 + bad;
    block.from_then_on = bad == kBlocks;
    FaultyFileSystem fs(&memory, {whole, block});
    const auto damage = ScrubMetrics(&fs, path, text.size(), NewerLines::kRefused);
    TERRACE_ASSERT_OK(damage);
    ASSERT_EQ(damage->size(), 1u);
    const DamagedMetrics& stretch = (*damage)[0];
    const std::uint64_t first = bad == kBlocks ? 0 : bad * kBlock;
    const std::uint64_t last = bad == kBlocks ? text.size() : std::min(first + kBlock, text.size());
    const std::uint64_t begin = first == 0 ? 0 : text.rfind('\n', first - 1) + 1;
    const std::uint64_t end = std::min(text.find('\n', last) + 1, text.size());
    EXPECT_EQ(stretch.offset, begin);
    EXPECT_EQ(stretch.offset + stretch.bytes, last == text.size() ? last : end);
    EXPECT_THAT(stretch.what, HasSubstr("metrics.jsonl"));
    fs.SetRules({});
    TERRACE_ASSERT_OK(MendMetrics(&fs, path, text.size(), *damage));
    const std::string mended = io_testing::ReadAll(&memory, path);
    ASSERT_EQ(mended.size(), text.size());
    EXPECT_EQ(mended.substr(0, stretch.offset), text.substr(0, stretch.offset));
    EXPECT_EQ(mended.substr(stretch.offset + stretch.bytes),
              text.substr(stretch.offset + stretch.bytes));
    const auto left = ScrubMetrics(&fs, path, text.size(), NewerLines::kRefused);
    TERRACE_ASSERT_OK(left);
    EXPECT_TRUE(left->empty());
  }
}

TEST(Metrics, TheFileHasTheChecksumOfItsLines) {
  MemoryFileSystem fs;
  DiskQuota quota(std::uint64_t{1} << 30);
  const std::string path = "/metrics.jsonl";
  const auto checksum_of = [](const std::string& text) {
    return Checksum64(std::as_bytes(std::span(text)));
  };
  {
    auto file = MetricsFile::Open(&fs, &quota, path, 0, std::nullopt);
    TERRACE_ASSERT_OK(file.status());
    for (const char* line : {"one", "two", "three"}) TERRACE_ASSERT_OK((*file)->Append(line));
    EXPECT_EQ((*file)->checksum(), checksum_of("one\ntwo\nthree\n"));
  }
  const auto wrong = MetricsFile::Open(&fs, &quota, path, 8, checksum_of("one\ntoo\n"));
  EXPECT_EQ(wrong.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(wrong.status().message(), HasSubstr("the first 8 bytes have checksum"));
  EXPECT_EQ(io_testing::ReadAll(&fs, path), "one\ntwo\nthree\n") << "it is not cut";
  auto file = MetricsFile::Open(&fs, &quota, path, 8, checksum_of("one\ntwo\n"));
  TERRACE_ASSERT_OK(file.status());
  TERRACE_ASSERT_OK((*file)->Append("four"));
  EXPECT_EQ(io_testing::ReadAll(&fs, path), "one\ntwo\nfour\n");
  EXPECT_EQ((*file)->checksum(), checksum_of("one\ntwo\nfour\n"));
  // More than is read at once.
  TERRACE_ASSERT_OK((*file)->Append(std::string(3'000'000, 'x')));
  const std::uint64_t bytes = (*file)->bytes();
  TERRACE_EXPECT_OK(MetricsFile::Open(&fs, &quota, path, bytes, (*file)->checksum()));
  EXPECT_FALSE(MetricsFile::Open(&fs, &quota, path, bytes - 1, (*file)->checksum()).ok());
}

TEST(Metrics, ALineThatFailsLeavesTheFileAsItWasAndInUse) {
  for (const char* fault : {"write:2:enospc", "write:2:short_write"}) {
    SCOPED_TRACE(fault);
    MemoryFileSystem memory;
    const auto rules = ParseFaultRules(fault);
    TERRACE_ASSERT_OK(rules);
    FaultyFileSystem fs(&memory, *rules);
    DiskQuota quota(std::uint64_t{1} << 30);
    auto file = MetricsFile::Open(&fs, &quota, "/metrics.jsonl", 0, std::nullopt);
    TERRACE_ASSERT_OK(file.status());
    TERRACE_ASSERT_OK((*file)->Append("one"));
    EXPECT_EQ((*file)->Append("two").code(), StatusCode::kIo);
    TERRACE_EXPECT_OK((*file)->Sync());
    EXPECT_EQ(io_testing::ReadAll(&memory, "/metrics.jsonl"), "one\n");
    TERRACE_EXPECT_OK((*file)->Append("three"));
    EXPECT_EQ(io_testing::ReadAll(&memory, "/metrics.jsonl"), "one\nthree\n");
    TERRACE_EXPECT_OK(MetricsFile::Open(&memory, &quota, "/metrics.jsonl", (*file)->bytes(),
                                        (*file)->checksum()));
  }
}

TEST(Metrics, UnadmittedShowsStandOnlyWhereTheyAreCounted) {
  IntervalRecord interval;
  EXPECT_EQ(IntervalToJson(interval).find("unadmitted"), std::string::npos);
  interval.unadmitted_shows = 0;
  EXPECT_THAT(IntervalToJson(interval), HasSubstr("\"unadmitted_shows\":0,\"performance\""));
}

TEST(Summary, TableSaysWhatAPersonWants) {
  const std::string table = SummaryTable(SampleSummary(), "runs/a");
  EXPECT_THAT(table, HasSubstr("runs/a finished at checkpoint 12"));
  EXPECT_THAT(table, HasSubstr("1,000 in 0:01:01 (16.4 k/s)"));
  EXPECT_THAT(table, HasSubstr("AUC 0.7500, log loss 0.1000, NE 0.8000, calibration -"));
  EXPECT_THAT(table, HasSubstr("90.0 % of row accesses hit"));
  EXPECT_THAT(table, HasSubstr("longest stage   train"));
}

TEST(Progress, LineAndDurations) {
  Progress progress;
  progress.examples = 1234567;
  progress.examples_per_second = 45600;
  progress.auc = 0.76123;
  progress.logloss = 0.45871;
  progress.hit_rate = 0.931;
  progress.ssd_read_bytes_per_second = 12.3e6;
  progress.ssd_write_bytes_per_second = 4.5e6;
  progress.memory_bytes = std::uint64_t{3} << 29;
  progress.eta_seconds = 725;
  EXPECT_EQ(ProgressLine(progress),
            "1,234,567 examples | 45.6 k/s | AUC 0.7612 | log loss 0.4587 | hits 93.1 % | "
            "SSD 12.3 + 4.5 MB/s | 1.50 GiB | 0:12:05 left");
  progress.eta_seconds = -1;
  progress.auc = std::nan("");
  EXPECT_THAT(ProgressLine(progress), HasSubstr("AUC - |"));
  EXPECT_THAT(ProgressLine(progress), testing::EndsWith("1.50 GiB"));
}

TEST(Progress, TimeLeftIsOfWhatIsNotTrainedYet) {
  // A quarter of the log is read, not all of it trained: 400 examples in all.
  const Advance advance = {80, 100, 0.25, 0, 10};
  EXPECT_EQ(SecondsLeft(advance), 32);
  Advance other = advance;
  other.max_examples = 200;
  EXPECT_EQ(SecondsLeft(other), 12);
  other.read_share = 0;
  EXPECT_EQ(SecondsLeft(other), 12);
  other.max_examples = 0;
  EXPECT_LT(SecondsLeft(other), 0) << "unknown";
  other = advance;
  other.read = 400;
  other.read_share = 1;
  EXPECT_EQ(SecondsLeft(other), 32) << "all is read, not trained";
  other.max_examples = 50;
  EXPECT_EQ(SecondsLeft(other), 0);
  other.examples_per_second = 0;
  EXPECT_LT(SecondsLeft(other), 0);
}

TEST(Progress, Durations) {
  EXPECT_EQ(FormatDuration(3.214), "3.21 s");
  EXPECT_EQ(FormatDuration(36000), "10:00:00");
  EXPECT_EQ(FormatDuration(std::nan("")), "-");
}

}  // namespace
}  // namespace terrace
