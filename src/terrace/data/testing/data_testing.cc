#include "terrace/data/testing/data_testing.h"

#include <zlib.h>
#include <zstd.h>

#include <cstddef>
#include <utility>

namespace terrace {

void PutFile(FileSystem* fs, const std::string& path, std::string_view text) {
  const std::size_t slash = path.rfind('/');
  if (slash != std::string::npos && slash > 0) {
    const Status made = fs->MakeDirectories(path.substr(0, slash));
    ASSERT_TRUE(made.ok()) << made.ToString();
  }
  const Status removed = fs->Remove(path);
  ASSERT_TRUE(removed.ok() || removed.code() == StatusCode::kNotFound) << removed.ToString();
  auto file = fs->Open(path, OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const Status written =
      (*file)->WriteAt(0, {reinterpret_cast<const std::byte*>(text.data()), text.size()});
  ASSERT_TRUE(written.ok()) << written.ToString();
}

std::string Gzip(std::string_view text) {
  z_stream z = {};
  EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(out.size() - z.avail_out);
  deflateEnd(&z);
  return out;
}

std::string Zstd(std::string_view text, int window_log) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  EXPECT_FALSE(ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1)));
  EXPECT_FALSE(ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window_log)));
  const std::size_t size =
      ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size());
  ZSTD_freeCCtx(context);
  EXPECT_FALSE(ZSTD_isError(size));
  out.resize(size);
  return out;
}

std::string CriteoLine(int label, int number, char delimiter) {
  std::string line = std::to_string(label);
  for (int i = 0; i < 13; ++i) {
    line += delimiter;
    if ((number + i) % 5 != 0) line += std::to_string((number * 7 + i * 31) % 400 - 3);
  }
  for (int i = 0; i < 26; ++i) {
    line += delimiter;
    if ((number + i) % 7 == 0) continue;
    char hex[16];
    std::snprintf(hex, sizeof(hex), "%08x", static_cast<unsigned>(number * 2654435761u + i));
    line += hex;
  }
  return line;
}

void AppendBatch(const Batch& batch, std::size_t dense_width, Stream* stream) {
  ASSERT_EQ(batch.label.size(), batch.examples);
  ASSERT_EQ(batch.dense.size(), batch.examples * dense_width);
  ASSERT_EQ(batch.key_begin.size(), std::size_t{batch.examples} * batch.slots + 1);
  ASSERT_EQ(batch.key_begin.back(), batch.keys.size());
  ASSERT_EQ(batch.origin_file.size(), batch.examples);
  ASSERT_EQ(batch.origin_line.size(), batch.examples);
  ASSERT_TRUE(batch.bad_lines_before.empty() ||
              batch.bad_lines_before.size() == batch.examples + 1u);
  ASSERT_FALSE(batch.cursors.empty());
  for (std::size_t e = 0; e < batch.examples; ++e) {
    Example example;
    example.ordinal = batch.first_example + e;
    example.label = batch.label[e];
    example.dense.assign(batch.dense.begin() + static_cast<std::ptrdiff_t>(e * dense_width),
                         batch.dense.begin() + static_cast<std::ptrdiff_t>((e + 1) * dense_width));
    for (std::size_t s = 0; s < batch.slots; ++s) {
      const std::size_t begin = batch.key_begin[e * batch.slots + s];
      const std::size_t end = batch.key_begin[e * batch.slots + s + 1];
      ASSERT_LE(begin, end);
      example.keys.emplace_back(batch.keys.begin() + static_cast<std::ptrdiff_t>(begin),
                                batch.keys.begin() + static_cast<std::ptrdiff_t>(end));
    }
    example.file = batch.origin_file[e];
    example.line = batch.origin_line[e];
    if (!batch.bad_lines_before.empty()) example.bad_before = batch.bad_lines_before[e];
    stream->examples.push_back(std::move(example));
  }
  stream->cursors.insert(stream->cursors.end(), batch.cursors.begin(), batch.cursors.end());
  if (batch.ends_epoch)
    stream->bad_after_epoch.push_back(
        batch.bad_lines_before.empty() ? 0 : batch.bad_lines_before.back());
}

Stream ReadStream(ExampleSource* source, std::uint32_t minibatch,
                  const std::vector<std::uint32_t>& batch_sizes) {
  Stream stream;
  for (std::size_t i = 0;; ++i) {
    auto batch = source->Next(batch_sizes[i % batch_sizes.size()], minibatch);
    if (!batch.ok()) {
      stream.status = batch.status();
      return stream;
    }
    if (!batch->has_value()) return stream;
    AppendBatch(**batch, source->schema().dense_width(), &stream);
    if (::testing::Test::HasFatalFailure()) return stream;
  }
}

}  // namespace terrace
