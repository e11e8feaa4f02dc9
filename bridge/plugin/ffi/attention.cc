// Attention over a paged cache on the emulated chip: the calls by which libtt's kernels are asked
// for it. Only pages up to a request's own position are read, in the cache's type, with a
// running softmax in float.
//   tt.paged_scaled_dot_product_attention_decode: a token of each request,
//   tt.chunked_scaled_dot_product_attention: a chunk of one request,
//   tt.paged_update_cache, tt.paged_fill_cache: writing the cache.
// Operands and attributes: kernels_replacements/tt_calls.py.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "handlers.h"
#include "kernels.h"
#include "tasks.h"

namespace tt {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRowTile = 64;    // rows of queries that share a pass over the pages
constexpr int64_t kSplit = 512;     // positions after which another thread may go on
constexpr int64_t kMostPage = 512;  // positions of a page
constexpr float kNothing = -std::numeric_limits<float>::infinity();

ffi::Error Wrong(const char* call, std::string what) {
  return ffi::Error::InvalidArgument(std::string(call) + ": " + std::move(what));
}

struct Cache {
  const void* data = nullptr;
  int64_t pages = 0, heads = 0, size = 0, dim = 0;
  bool bf16 = false;

  explicit Cache(const ffi::AnyBuffer& buffer) : data(buffer.untyped_data()), bf16(buffer.element_type() == ffi::BF16) {
    auto shape = buffer.dimensions();
    pages = shape[0], heads = shape[1], size = shape[2], dim = shape[3];
  }
  int64_t ElementSize() const { return bf16 ? sizeof(Bfloat16) : sizeof(float); }
  const char* At(int64_t page, int64_t head) const {
    return static_cast<const char*>(data) + (page * heads + head) * size * dim * ElementSize();
  }
};

// What one call asks for: `rows` queries of each sequence and key/value head, one after the
// other in q and in the result; row r of a sequence is its token r % tokens and sees the
// positions up to seen_to[sequence] + r % tokens.
struct Request {
  Cache keys, values;
  const void* q = nullptr;
  void* result = nullptr;  // of q's type
  bool q_bf16 = false;
  int64_t sequences = 0, rows = 0, tokens = 1;
  const int32_t* table = nullptr;
  int64_t table_width = 0;
  std::vector<int64_t> seen_to = {};
  float scale = 1;
  int64_t window = 0;  // 0: all
  std::optional<ffi::AnyBuffer> mask = {}, sink = {};

  int64_t Held() const { return table_width * keys.size; }
  // Scores are products of bfloat16 only where both sides are that.
  bool NarrowScores() const { return q_bf16 && keys.bf16; }
};

void Widen(const Bfloat16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat(from[i]);
}

// The softmax of some rows over some positions: per row the highest score, the sum of
// exponentials and the weighted values.
struct Partial {
  std::vector<float> highest, sum, out;

  Partial(int64_t rows, int64_t dim) : highest(rows, kNothing), sum(rows, 0.0f), out(rows * dim, 0.0f) {}

  // Makes room for scores as high as `score`; the factor for what was there.
  float Raise(int64_t row, int64_t dim, float score) {
    if (!(score > highest[row]) && !std::isnan(score)) return 1.0f;
    float factor = highest[row] == kNothing ? 0.0f : std::exp(highest[row] - score);
    highest[row] = score;
    sum[row] *= factor;
    for (int64_t i = 0; i < dim; ++i) out[row * dim + i] *= factor;
    return factor;
  }
};

float MaskAt(const Request& request, int64_t sequence, int64_t head, int64_t row, int64_t position) {
  int64_t heads = request.keys.heads * request.rows;
  int64_t place = (sequence * heads + head * request.rows + row) * request.Held() + position;
  if (request.mask->element_type() == ffi::BF16) return ToFloat(request.mask->typed_data<Bfloat16>()[place]);
  return request.mask->typed_data<float>()[place];
}

// One task: rows [row, row + rows) of a sequence and head over positions [begin, end).
class Task {
 public:
  Task(const Request& request, const Kernels& kernels, int64_t sequence, int64_t head, int64_t row, int64_t begin,
       int64_t end)
      : request_(request), kernels_(kernels), sequence_(sequence), head_(head), row_(row), begin_(begin), end_(end),
        rows_(std::min(kRowTile, request.rows - row)), partial(rows_, request.values.dim) {}

  void Run() {
    bool narrow = request_.NarrowScores();
    int64_t dim = request_.keys.dim, stride = kernels_.Stride(dim, narrow);
    Memory queries = Allocate(rows_ * stride * kernels_.PreparedSize(narrow));
    int64_t place = ((sequence_ * request_.keys.heads + head_) * request_.rows + row_) * dim;
    auto* narrow_q = static_cast<const Bfloat16*>(request_.q) + place;
    if (narrow) {
      kernels_.prepare_bf16(narrow_q, rows_, dim, stride, queries.get());
    } else if (request_.q_bf16) {
      std::vector<float> wide(rows_ * dim);
      Widen(narrow_q, rows_ * dim, wide.data());
      kernels_.prepare_f32(wide.data(), rows_, dim, stride, queries.get());
    } else {
      kernels_.prepare_f32(static_cast<const float*>(request_.q) + place, rows_, dim, stride, queries.get());
    }
    scores_.resize(rows_ * request_.keys.size);
    products_.resize(rows_ * request_.values.dim);
    for (int64_t first = begin_ / request_.keys.size * request_.keys.size; first < end_; first += request_.keys.size)
      Page(first, queries.get(), stride);
  }

  int64_t sequence() const { return sequence_; }
  int64_t head() const { return head_; }
  int64_t row() const { return row_; }
  int64_t rows() const { return rows_; }

 private:
  // A head's part of a page; null where there is no page.
  const char* PartOf(const Cache& cache, int64_t position) const {
    if (position >= end_) return nullptr;
    int64_t page = request_.table[sequence_ * request_.table_width + position / cache.size];
    return page >= 0 && page < cache.pages ? cache.At(page, head_) : nullptr;
  }

  // Positions [first, first + page size).
  void Page(int64_t first, const void* queries, int64_t stride) {
    const Cache &keys = request_.keys, &values = request_.values;
    int64_t count = std::min(keys.size, end_ - first);
    int64_t page = request_.table[sequence_ * request_.table_width + first / keys.size];
    const char *part = PartOf(keys, first), *values_part = PartOf(values, first);
    if (part != nullptr) {
      Problem scores{queries, stride, part, scores_.data(), false, rows_, keys.dim, count, values_part};
      if (keys.bf16 && !request_.NarrowScores()) {
        wide_page_.resize(count * keys.dim);
        Widen(static_cast<const Bfloat16*>(scores.weights), count * keys.dim, wide_page_.data());
        scores.weights = wide_page_.data();
        scores.next = scores.weights;
      }
      (request_.NarrowScores() ? kernels_.nk_bf16 : kernels_.nk_f32)(scores, 0, count);
    } else {
      // No page reads as zeros; one that does not exist must not look like a result.
      std::fill_n(scores_.data(), rows_ * count, page < 0 ? 0.0f : std::nanf(""));
    }
    for (int64_t row = 0; row < rows_; ++row) Weigh(row, first, count);
    if (part == nullptr) return;
    // The CPU cannot foresee which page follows.
    const char* next = PartOf(keys, first + keys.size);
    Problem weighted{scores_.data(), count, values_part, products_.data(), false, rows_, count, values.dim,
                     next != nullptr ? next : values_part};
    (values.bf16 ? kernels_.kn_bf16 : kernels_.kn_f32)(weighted, 0, values.dim);
    for (int64_t i = 0; i < rows_ * values.dim; ++i) partial.out[i] += products_[i];
  }

  // The scores of a row become weights; those that it does not see become zero.
  void Weigh(int64_t row, int64_t first, int64_t count) {
    float* scores = scores_.data() + row * count;
    int64_t last = request_.seen_to[sequence_] + (row_ + row) % request_.tokens;
    int64_t from = std::max(begin_, request_.window > 0 ? last - request_.window + 1 : 0);
    int64_t begin = std::clamp<int64_t>(from - first, 0, count);
    int64_t end = std::clamp<int64_t>(last + 1 - first, begin, count);
    float highest = kernels_.scale(scores + begin, end - begin, request_.scale);
    if (request_.mask) {
      highest = kNothing;
      for (int64_t i = begin; i < end; ++i) {
        scores[i] += MaskAt(request_, sequence_, head_, row_ + row, first + i);
        if (!(scores[i] <= highest)) highest = scores[i];
      }
    }
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + end, scores + count, 0.0f);
    if (highest == kNothing) {
      std::fill(scores + begin, scores + end, 0.0f);
      return;
    }
    partial.Raise(row, request_.values.dim, highest);
    // Weights are rounded before they meet the values, where PyTorch's own attention rounds.
    partial.sum[row] += kernels_.exponentials(scores + begin, end - begin, partial.highest[row], request_.q_bf16);
  }

  const Request& request_;
  const Kernels& kernels_;
  const int64_t sequence_, head_, row_, begin_, end_, rows_;
  std::vector<float> scores_, products_, wide_page_;

 public:
  Partial partial;
};

void StoreRow(const Request& request, int64_t place, const float* values, float factor) {
  int64_t dim = request.values.dim;
  for (int64_t i = 0; i < dim; ++i) {
    float value = values[i] * factor;
    if (request.q_bf16) static_cast<Bfloat16*>(request.result)[place * dim + i] = ToBfloat16(value);
    else static_cast<float*>(request.result)[place * dim + i] = value;
  }
}

// Brings together what was computed of the same rows, tasks [begin, end).
void Merge(const Request& request, std::vector<Task>& tasks, size_t begin, size_t end) {
  Task& first = tasks[begin];
  int64_t dim = request.values.dim;
  for (int64_t row = 0; row < first.rows(); ++row) {
    Partial& to = first.partial;
    if (request.sink) {
      // A score that takes weight and brings no value: the first column of the head's row.
      int64_t head = first.head() * (request.rows / request.tokens) + (first.row() + row) / request.tokens;
      int64_t place = head * request.sink->dimensions()[1];
      float sink = request.sink->element_type() == ffi::BF16 ? ToFloat(request.sink->typed_data<Bfloat16>()[place])
                                                             : request.sink->typed_data<float>()[place];
      to.Raise(row, dim, sink);
      to.sum[row] += std::exp(sink - to.highest[row]);
    }
    for (size_t i = begin + 1; i < end; ++i) {
      const Partial& from = tasks[i].partial;
      if (from.highest[row] == kNothing) continue;
      to.Raise(row, dim, from.highest[row]);
      float factor = std::exp(from.highest[row] - to.highest[row]);
      to.sum[row] += from.sum[row] * factor;
      for (int64_t d = 0; d < dim; ++d) to.out[row * dim + d] += from.out[row * dim + d] * factor;
    }
    int64_t place = (first.sequence() * request.keys.heads + first.head()) * request.rows + first.row() + row;
    StoreRow(request, place, to.out.data() + row * dim, to.sum[row] == 0 ? 0.0f : 1.0f / to.sum[row]);
  }
}

void Attend(ffi::ThreadPool& threads, const Request& request) {
  const Kernels& kernels = *FindKernels();
  std::vector<Task> tasks;
  std::vector<size_t> groups;
  for (int64_t sequence = 0; sequence < request.sequences; ++sequence) {
    for (int64_t head = 0; head < request.keys.heads; ++head) {
      for (int64_t row = 0; row < request.rows; row += kRowTile) {
        groups.push_back(tasks.size());
        int64_t seen_to = request.seen_to[sequence];
        int64_t end = seen_to < 0 ? 0 : std::min(request.Held(), seen_to + request.tokens);
        int64_t begin = request.window > 0 ? std::max<int64_t>(0, seen_to - request.window + 1) : 0;
        do {
          int64_t next = std::min(end, (begin / kSplit + 1) * kSplit);
          tasks.emplace_back(request, kernels, sequence, head, row, begin, next);
          begin = next;
        } while (begin < end);
      }
    }
  }
  groups.push_back(tasks.size());
  Tasks::RunAll(threads, static_cast<int32_t>(tasks.size()), [&](int32_t i) { tasks[i].Run(); });
  for (size_t i = 0; i + 1 < groups.size(); ++i) Merge(request, tasks, groups[i], groups[i + 1]);
}

// Empty when q, the caches and the table fit each other and the kernels.
std::string Mismatch(const ffi::AnyBuffer& q, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values,
                     const ffi::AnyBuffer& table, int64_t q_heads) {
  auto type = keys.element_type();
  if (q.dimensions().size() != 4 || keys.dimensions().size() != 4 || values.dimensions().size() != 4)
    return "q and the caches must have 4 dimensions";
  if (type != ffi::F32 && type != ffi::BF16) return "the caches must be float32 or bfloat16";
  if (values.element_type() != type) return "the caches must be of one type";
  if (q.element_type() != ffi::F32 && q.element_type() != ffi::BF16) return "q must be float32 or bfloat16";
  auto k = keys.dimensions(), v = values.dimensions();
  if (k[0] != v[0] || k[1] != v[1] || k[2] != v[2]) return "the caches differ in shape";
  if (q.dimensions()[3] != k[3] || v[3] != k[3]) return "q and the caches differ in head dimension";
  if (k[1] == 0 || q_heads % k[1] != 0) return "the query's heads are no multiple of the cache's";
  if (k[2] < 1 || k[2] > kMostPage) return "a page must hold 1 to " + std::to_string(kMostPage) + " positions";
  if (table.element_type() != ffi::S32 || table.dimensions().size() != 2) return "the page table must be int32 [B, W]";
  return "";
}

constexpr char kDecode[] = "tt.paged_scaled_dot_product_attention_decode";

ffi::Error Decode(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::AnyBuffer table, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> result,
                  ffi::Dictionary attributes) {
  auto heads = q.dimensions().size() == 4 ? q.dimensions()[2] : 0;
  std::string mismatch = Mismatch(q, keys, values, table, heads);
  if (!mismatch.empty()) return Wrong(kDecode, mismatch);
  auto scale = attributes.get<float>("scale");
  auto has_mask = attributes.get<bool>("has_attention_mask");
  auto has_positions = attributes.get<bool>("has_cur_pos_tensor");
  auto has_sink = attributes.get<bool>("has_attention_sink");
  if (!scale || !has_mask || !has_positions || !has_sink)
    return Wrong(kDecode, "scale and the three has_* attributes are needed");
  if (rest.size() != size_t{*has_mask} + *has_positions + *has_sink) return Wrong(kDecode, "operands and has_* differ");

  int64_t batch = q.dimensions()[1];
  Request request{Cache(keys), Cache(values)};
  request.q = q.untyped_data(), request.result = result->untyped_data();
  request.q_bf16 = q.element_type() == ffi::BF16;
  request.sequences = batch, request.rows = heads / keys.dimensions()[1], request.tokens = 1;
  request.table = table.typed_data<int32_t>(), request.table_width = table.dimensions()[1];
  request.seen_to.assign(batch, request.Held() - 1);
  request.scale = *scale;
  size_t next = 0;
  if (*has_mask) request.mask = *rest.get<ffi::AnyBuffer>(next++);
  if (*has_positions) {
    auto positions = *rest.get<ffi::AnyBuffer>(next++);
    if (positions.element_type() != ffi::S32 || static_cast<int64_t>(positions.element_count()) != batch)
      return Wrong(kDecode, "positions must be int32 [B]");
    for (int64_t i = 0; i < batch; ++i)
      request.seen_to[i] = std::min<int64_t>(positions.typed_data<int32_t>()[i], request.Held() - 1);
  }
  if (*has_sink) request.sink = *rest.get<ffi::AnyBuffer>(next++);
  if (request.mask && static_cast<int64_t>(request.mask->element_count()) != batch * heads * request.Held())
    return Wrong(kDecode, "the mask must be [B, 1, H, W * page size]");
  if (request.sink && (request.sink->dimensions().size() != 2 || request.sink->dimensions()[0] != heads))
    return Wrong(kDecode, "the sink must be [H, columns]");
  if (table.dimensions()[0] != batch) return Wrong(kDecode, "the page table must have a row for each request");
  if (attributes.contains("sliding_window_size")) request.window = *attributes.get<int64_t>("sliding_window_size");
  Attend(threads, request);
  return ffi::Error::Success();
}

constexpr char kChunked[] = "tt.chunked_scaled_dot_product_attention";

ffi::Error Chunked(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                   ffi::AnyBuffer table, ffi::AnyBuffer start, ffi::Result<ffi::AnyBuffer> result,
                   ffi::Dictionary attributes) {
  auto heads = q.dimensions().size() == 4 ? q.dimensions()[1] : 0;
  std::string mismatch = Mismatch(q, keys, values, table, heads);
  if (!mismatch.empty()) return Wrong(kChunked, mismatch);
  auto scale = attributes.get<float>("scale");
  if (!scale) return Wrong(kChunked, "attribute scale is needed");
  if (q.dimensions()[0] != 1 || table.dimensions()[0] != 1) return Wrong(kChunked, "only one request a call");
  if (start.element_type() != ffi::S32 || start.element_count() != 1) return Wrong(kChunked, "start must be int32 [1]");
  int64_t tokens = q.dimensions()[2], first = start.typed_data<int32_t>()[0];
  if (first < 0) return Wrong(kChunked, "start must not be negative");
  Request request{Cache(keys), Cache(values)};
  request.q = q.untyped_data(), request.result = result->untyped_data();
  request.q_bf16 = q.element_type() == ffi::BF16;
  request.sequences = 1, request.rows = heads / keys.dimensions()[1] * tokens, request.tokens = tokens;
  request.table = table.typed_data<int32_t>(), request.table_width = table.dimensions()[1];
  request.seen_to = {first};
  request.scale = *scale;
  Attend(threads, request);
  return ffi::Error::Success();
}

// Writes into the cache that a call hands on: the operand's own memory where it may be, else a copy of it.
class Writer {
 public:
  Writer(const ffi::AnyBuffer& cache, const ffi::AnyBuffer& x, ffi::AnyBuffer& result)
      : to_(static_cast<char*>(result.untyped_data())), from_(static_cast<const char*>(x.untyped_data())),
        to_bf16_(cache.element_type() == ffi::BF16), from_bf16_(x.element_type() == ffi::BF16) {
    if (to_ != cache.untyped_data()) std::memcpy(to_, cache.untyped_data(), cache.size_bytes());
  }

  // Elements of x to elements of the cache, in its type.
  void Write(int64_t to, int64_t from, int64_t count) {
    if (to_bf16_ == from_bf16_) {
      int64_t size = to_bf16_ ? sizeof(Bfloat16) : sizeof(float);
      std::memcpy(to_ + to * size, from_ + from * size, count * size);
    } else if (to_bf16_) {
      auto* wide = reinterpret_cast<const float*>(from_) + from;
      for (int64_t i = 0; i < count; ++i) reinterpret_cast<Bfloat16*>(to_)[to + i] = ToBfloat16(wide[i]);
    } else {
      Widen(reinterpret_cast<const Bfloat16*>(from_) + from, count, reinterpret_cast<float*>(to_) + to);
    }
  }

 private:
  char* to_;
  const char* from_;
  bool to_bf16_, from_bf16_;
};

bool IsFloat(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == ffi::F32 || buffer.element_type() == ffi::BF16;
}

constexpr char kUpdate[] = "tt.paged_update_cache";

ffi::Error UpdateCache(ffi::AnyBuffer cache, ffi::AnyBuffer x, ffi::AnyBuffer positions, ffi::AnyBuffer table,
                       ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary) {
  if (cache.dimensions().size() != 4 || x.dimensions().size() != 4) return Wrong(kUpdate, "want 4 dimensions");
  auto shape = cache.dimensions(), row = x.dimensions();
  int64_t batch = row[1], heads = shape[1], size = shape[2];
  if (!IsFloat(x) || !IsFloat(cache) || row[0] != 1 || row[2] != heads || row[3] != shape[3])
    return Wrong(kUpdate, "x must be [1, B, heads, head dimension], float32 or bfloat16");
  if (positions.element_type() != ffi::S32 || static_cast<int64_t>(positions.element_count()) != batch ||
      table.element_type() != ffi::S32 || table.dimensions().size() != 2 || table.dimensions()[0] != batch)
    return Wrong(kUpdate, "positions must be int32 [B] and the page table int32 [B, W]");
  Writer writer(cache, x, *result);
  int64_t width = table.dimensions()[1];
  for (int64_t b = 0; b < batch; ++b) {
    int64_t position = positions.typed_data<int32_t>()[b];
    if (position < 0 || position >= width * size) continue;
    int64_t page = table.typed_data<int32_t>()[b * width + position / size];
    if (page < 0 || page >= shape[0]) continue;
    for (int64_t head = 0; head < heads; ++head)
      writer.Write(((page * heads + head) * size + position % size) * shape[3], (b * heads + head) * shape[3],
                   shape[3]);
  }
  return ffi::Error::Success();
}

constexpr char kFill[] = "tt.paged_fill_cache";

ffi::Error FillCache(ffi::AnyBuffer cache, ffi::AnyBuffer x, ffi::AnyBuffer table, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary) {
  if (cache.dimensions().size() != 4 || x.dimensions().size() != 4) return Wrong(kFill, "want 4 dimensions");
  auto shape = cache.dimensions(), rows = x.dimensions();
  int64_t heads = shape[1], size = shape[2], tokens = rows[2];
  if (!IsFloat(x) || !IsFloat(cache) || rows[0] != 1 || rows[1] != heads || rows[3] != shape[3])
    return Wrong(kFill, "x must be [1, heads, tokens, head dimension], float32 or bfloat16");
  if (table.element_type() != ffi::S32 || table.dimensions().size() != 2)
    return Wrong(kFill, "the page table must be int32 [B, W]");
  int64_t request = rest.size() == 0 ? 0 : rest.get<ffi::AnyBuffer>(0)->typed_data<int32_t>()[0];
  int64_t width = table.dimensions()[1];
  if (request < 0 || request >= table.dimensions()[0] || tokens > width * size)
    return Wrong(kFill, "x does not fit the page table");
  Writer writer(cache, x, *result);
  for (int64_t first = 0; first < tokens; first += size) {
    int64_t page = table.typed_data<int32_t>()[request * width + first / size];
    if (page < 0 || page >= shape[0]) continue;
    for (int64_t head = 0; head < heads; ++head)
      writer.Write((page * heads + head) * size * shape[3], (head * tokens + first) * shape[3],
                   std::min(size, tokens - first) * shape[3]);
  }
  return ffi::Error::Success();
}

using Buffer = ffi::AnyBuffer;
XLA_FFI_DEFINE_HANDLER(kDecodeHandler, Decode,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                           .RemainingArgs().Ret<Buffer>().Attrs());
XLA_FFI_DEFINE_HANDLER(kChunkedHandler, Chunked,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                           .Arg<Buffer>().Ret<Buffer>().Attrs());
XLA_FFI_DEFINE_HANDLER(kUpdateHandler, UpdateCache,
                       ffi::Ffi::Bind().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Ret<Buffer>().Attrs());
XLA_FFI_DEFINE_HANDLER(kFillHandler, FillCache,
                       ffi::Ffi::Bind().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>()
                           .Attrs());

}  // namespace

std::vector<FfiHandler> PagedAttentionHandlers() {
  return {{kDecode, reinterpret_cast<void*>(kDecodeHandler)},
          {kChunked, reinterpret_cast<void*>(kChunkedHandler)},
          {kUpdate, reinterpret_cast<void*>(kUpdateHandler)},
          {kFill, reinterpret_cast<void*>(kFillHandler)}};
}

}  // namespace tt
