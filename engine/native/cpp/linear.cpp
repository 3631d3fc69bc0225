// Linear layers whose weights were packed once: out (M, N) = x (M, K) weight^T * scale + bias, for few rows as for many.
//
// A weight lies in panels of 32 outputs: weight (P, K / 2, 32, 2), two successive inputs of one output side by side, which is
// what one AVX-512 bf16 dot product takes. Up to 11 rows share one pass over a panel, their 22 sums in registers, so that few
// rows are bound by reading the weight and many by arithmetic. 8-bit weights are a sign and seven bits of magnitude; the first
// pass widens them in registers by a table look-up (exactly: bf16 holds eight bits), further ones find the panel widened.
// Sums are fp32 throughout. Without AVX-512 bf16 the same layout is read by plain loops: right, not fast.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define LENGTHWISE_FAST 1
#include <immintrin.h>
#else
#define LENGTHWISE_FAST 0
#endif

namespace {

constexpr int64_t kPanel = 32;      // outputs side by side
constexpr int64_t kRows = 11;       // rows in one pass: 22 sums, two weights and one input fit the 32 registers
constexpr int64_t kGrain = 1 << 15; // bytes of weight below which a second thread does not pay

struct Layer {  // one weight to multiply with
  const void* weight;
  const float* scale;  // (N,) or null
  const float* bias;   // (N,) or null
  void* out;           // (M, N), bf16 or fp32
  int64_t num_out;
};

struct Shape {
  int64_t rows, pairs;  // M, K / 2
  bool bytes;           // the weight is 8-bit
  bool wide;            // the output is fp32
};

float widen(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

uint16_t narrow(float value) {  // to the nearest bf16, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void finish_plain(const float* sums, const Layer& layer, const Shape& shape, int64_t row, int64_t first) {
  for (int64_t j = 0; j < std::min(kPanel, layer.num_out - first); ++j) {
    float value = sums[j];
    if (layer.scale) value *= layer.scale[first + j];
    if (layer.bias) value += layer.bias[first + j];
    int64_t at = row * layer.num_out + first + j;
    if (shape.wide) static_cast<float*>(layer.out)[at] = value;
    else static_cast<uint16_t*>(layer.out)[at] = narrow(value);
  }
}

// One panel for all rows, any processor: widened to fp32 once, (pairs, 2, 32), then plain sums.
void panel_plain(const uint16_t* x, const Layer& layer, const Shape& shape, int64_t panel) {
  thread_local std::vector<float> widened;
  widened.resize(static_cast<size_t>(shape.pairs * 2 * kPanel));
  float* wide = widened.data();
  for (int64_t k = 0; k < shape.pairs; ++k, wide += 2 * kPanel) {
    int64_t from = (panel * shape.pairs + k) * 2 * kPanel;
    if (shape.bytes) {  // in the order that AVX-512's unpack wants: 16 bytes hold four outputs of either half of the panel
      const uint8_t* code = static_cast<const uint8_t*>(layer.weight) + from;
      for (int64_t j = 0; j < kPanel; ++j) {
        const uint8_t* pair = code + j % 16 / 4 * 16 + j / 16 * 8 + j % 4 * 2;
        for (int64_t i = 0; i < 2; ++i)
          wide[i * kPanel + j] = static_cast<float>((pair[i] & 0x80) ? -static_cast<int>(pair[i] & 0x7f) : pair[i]);
      }
    } else {
      const uint16_t* pair = static_cast<const uint16_t*>(layer.weight) + from;
      for (int64_t j = 0; j < kPanel; ++j) wide[j] = widen(pair[2 * j]), wide[kPanel + j] = widen(pair[2 * j + 1]);
    }
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    float sums[kPanel] = {};
    for (int64_t k = 0; k < 2 * shape.pairs; ++k) {
      float a = widen(x[row * 2 * shape.pairs + k]);
      for (int64_t j = 0; j < kPanel; ++j) sums[j] += a * widened[static_cast<size_t>(k * kPanel + j)];
    }
    finish_plain(sums, layer, shape, row, panel * kPanel);
  }
}

#if LENGTHWISE_FAST

#define LENGTHWISE_INLINE __attribute__((always_inline)) inline
#define LENGTHWISE_VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")))

struct Table {  // the two bytes of a bf16 for each magnitude
  alignas(64) uint8_t low[128], high[128];
  Table() {
    for (int i = 0; i < 128; ++i) {
      uint16_t bits = narrow(static_cast<float>(i));
      low[i] = static_cast<uint8_t>(bits), high[i] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
const Table table;

LENGTHWISE_INLINE __m512bh both(const uint16_t* pair) {  // two inputs, in every lane
  int bits;
  std::memcpy(&bits, pair, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

template <int R>
LENGTHWISE_INLINE void multiply(__m512 (&sums)[R][2], const uint16_t* x, int64_t stride, __m512i first, __m512i second) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    __m512bh a = both(x + r * stride);
    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], reinterpret_cast<__m512bh>(first), a);
    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], reinterpret_cast<__m512bh>(second), a);
  }
}

template <int R>
LENGTHWISE_INLINE void finish(const __m512 (&sums)[R][2], const Layer& layer, const Shape& shape, int64_t row, int64_t first) {
  int64_t left = layer.num_out - first;
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    int64_t here = std::clamp<int64_t>(left - 16 * h, 0, 16);
    __mmask16 mask = static_cast<__mmask16>((1u << here) - 1);
    if (!mask) break;
    int64_t column = first + 16 * h;
    __m512 scale = layer.scale ? _mm512_maskz_loadu_ps(mask, layer.scale + column) : _mm512_set1_ps(1.0f);
    __m512 bias = layer.bias ? _mm512_maskz_loadu_ps(mask, layer.bias + column) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      __m512 value = _mm512_add_ps(_mm512_mul_ps(sums[r][h], scale), bias);
      int64_t at = (row + r) * layer.num_out + column;
      if (shape.wide) _mm512_mask_storeu_ps(static_cast<float*>(layer.out) + at, mask, value);
      else _mm256_mask_storeu_epi16(static_cast<uint16_t*>(layer.out) + at, mask,
                                    reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
    }
  }
}

// R rows from `row` on with one panel of bf16 at `w`. ahead: memory that will be read next, one cache line a pair, or null.
template <int R>
void pass(const uint16_t* x, const uint16_t* w, const char* ahead, const Layer& layer, const Shape& shape, int64_t row,
          int64_t first) {
  __m512 sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  int64_t stride = 2 * shape.pairs;
  const uint16_t* from = x + row * stride;
  int64_t step = ahead ? 64 : 0;
  if (!ahead) ahead = reinterpret_cast<const char*>(w);
  for (int64_t k = 0; k < shape.pairs; ++k, from += 2, w += 64, ahead += step) {
    _mm_prefetch(ahead, _MM_HINT_T1);
    multiply<R>(sums, from, stride, _mm512_loadu_si512(w), _mm512_loadu_si512(w + 32));
  }
  finish<R>(sums, layer, shape, row, first);
}

LENGTHWISE_VBMI LENGTHWISE_INLINE void widen_bytes(const uint8_t* w, __m512i (&t)[4], __m512i& first, __m512i& second) {
  __m512i code = _mm512_loadu_si512(w);
  __m512i low = _mm512_permutex2var_epi8(t[0], code, t[1]);
  __m512i high = _mm512_permutex2var_epi8(t[2], code, t[3]);
  high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (code & sign)
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

LENGTHWISE_VBMI LENGTHWISE_INLINE void load_table(__m512i (&t)[4]) {
  t[0] = _mm512_load_si512(table.low), t[1] = _mm512_load_si512(table.low + 64);
  t[2] = _mm512_load_si512(table.high), t[3] = _mm512_load_si512(table.high + 64);
}

// The first R rows with one panel of bytes at `w`, widened on the way; Keep: the widened panel to `keep`, for further rows.
template <int R, bool Keep>
LENGTHWISE_VBMI void pass_bytes(const uint16_t* x, const uint8_t* w, uint16_t* keep, const Layer& layer, const Shape& shape,
                                int64_t panel) {
  __m512i t[4] = {_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64), _mm512_load_si512(table.high),
                  _mm512_load_si512(table.high + 64)};
  __m512 sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  int64_t stride = 2 * shape.pairs;
  const uint16_t* from = x;
  for (int64_t k = 0; k < shape.pairs; ++k, from += 2, w += 64) {
    __m512i code = _mm512_loadu_si512(w);
    __m512i low = _mm512_permutex2var_epi8(t[0], code, t[1]), high = _mm512_permutex2var_epi8(t[2], code, t[3]);
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (code & sign)
    __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
    if (Keep) {
      _mm512_storeu_si512(keep + 64 * k, first);
      _mm512_storeu_si512(keep + 64 * k + 32, second);
    }
    multiply<R>(sums, from, stride, first, second);
  }
  finish<R>(sums, layer, shape, 0, panel);
}

using Pass = void (*)(const uint16_t*, const uint16_t*, const char*, const Layer&, const Shape&, int64_t, int64_t);
constexpr Pass passes[kRows] = {pass<1>, pass<2>, pass<3>, pass<4>,  pass<5>, pass<6>,
                                pass<7>, pass<8>, pass<9>, pass<10>, pass<11>};
using PassBytes = void (*)(const uint16_t*, const uint8_t*, uint16_t*, const Layer&, const Shape&, int64_t);
template <bool Keep>
constexpr PassBytes passes_bytes[kRows] = {
    pass_bytes<1, Keep>, pass_bytes<2, Keep>, pass_bytes<3, Keep>,  pass_bytes<4, Keep>,
    pass_bytes<5, Keep>, pass_bytes<6, Keep>, pass_bytes<7, Keep>,  pass_bytes<8, Keep>,
    pass_bytes<9, Keep>, pass_bytes<10, Keep>, pass_bytes<11, Keep>};

// One panel for all rows. While later rows use it from the cache, the next one is fetched from memory.
void panel_fast(const uint16_t* x, const Layer& layer, const Shape& shape, int64_t panel, bool last) {
  int64_t groups = (shape.rows + kRows - 1) / kRows, size = shape.pairs * 64, first = panel * kPanel, done = 0;
  int64_t bytes = size * (shape.bytes ? 1 : 2);
  const char* here = static_cast<const char*>(layer.weight) + panel * bytes;
  const uint16_t* w = reinterpret_cast<const uint16_t*>(here);
  if (shape.bytes) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(here);
    if (groups == 1) return passes_bytes<false>[shape.rows - 1](x, codes, nullptr, layer, shape, first);
    thread_local std::vector<uint16_t> widened;
    if (static_cast<int64_t>(widened.size()) < size) widened.resize(static_cast<size_t>(size));
    passes_bytes<true>[shape.rows / groups - 1](x, codes, widened.data(), layer, shape, first);
    w = widened.data(), done = 1;
  }
  for (int64_t g = done; g < groups; ++g) {  // rows are dealt evenly: 12 are twice 6, not 11 and 1
    int64_t row = g * shape.rows / groups, next = (g + 1) * shape.rows / groups, part = (g - 1) * size;
    const char* ahead = !last && g && part < bytes ? here + bytes + part : nullptr;
    passes[next - row - 1](x, w, ahead, layer, shape, row, first);
  }
}
#endif

bool fast_here() {
#if LENGTHWISE_FAST
  return __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

void run(const uint16_t* x, const std::vector<Layer>& layers, const Shape& shape) {
  if (!shape.rows) return;
  std::vector<int64_t> starts{0};  // panels of all layers, numbered through
  for (const Layer& layer : layers) starts.push_back(starts.back() + (layer.num_out + kPanel - 1) / kPanel);
  int64_t panel_bytes = shape.pairs * 64 * (shape.bytes ? 1 : 2);
  int64_t work = panel_bytes * (1 + shape.rows / kRows);
  static const bool fast = fast_here();
  at::parallel_for(0, starts.back(), std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
    size_t i = 0;
    for (int64_t p = begin; p < end; ++p) {
      while (p >= starts[i + 1]) ++i;
#if LENGTHWISE_FAST
      if (fast) {
        panel_fast(x, layers[i], shape, p - starts[i], p + 1 == std::min(end, starts[i + 1]));
        continue;
      }
#endif
      panel_plain(x, layers[i], shape, p - starts[i]);
    }
  });
}

const float* numbers(const at::Tensor& values, int64_t num_out, const char* what) {  // empty: none
  if (!values.numel()) return nullptr;
  TORCH_CHECK_VALUE(values.scalar_type() == at::kFloat && values.is_contiguous() && values.numel() == num_out, what, " of ",
                    values.numel(), " for ", num_out, " outputs: fp32, contiguous and one an output");
  return values.const_data_ptr<float>();
}

std::vector<at::Tensor> linears(const at::Tensor& input, at::TensorList weights, at::TensorList scales, at::TensorList biases,
                                at::IntArrayRef num_outs, bool wide) {
  TORCH_CHECK_VALUE(input.scalar_type() == at::kBFloat16, "the input is ", input.scalar_type(), ", not bf16");
  TORCH_CHECK_VALUE(!weights.empty() && scales.size() == weights.size() && biases.size() == weights.size() &&
                        num_outs.size() == weights.size(),
                    "weights, scales, biases and num_outs go together");
  int64_t k = input.size(-1), m = input.numel() / std::max<int64_t>(k, 1);
  Shape shape{m, (k + 1) / 2, weights[0].scalar_type() == at::kByte, wide};
  at::Tensor x = input.reshape({m, k});
  if (k % 2) x = at::constant_pad_nd(x, {0, 1});
  x = x.contiguous();
  std::vector<int64_t> sizes(input.sizes().vec());
  std::vector<at::Tensor> outs;
  std::vector<Layer> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& w = weights[i];
    int64_t n = num_outs[i];
    TORCH_CHECK_VALUE(w.dim() == 4 && w.is_contiguous() && w.size(0) == (n + kPanel - 1) / kPanel && w.size(1) == shape.pairs &&
                          w.size(2) == kPanel && w.size(3) == 2,
                      "a packed weight ", w.sizes(), " does not take ", k, " inputs to ", n, " outputs");
    TORCH_CHECK_VALUE(w.scalar_type() == (shape.bytes ? at::kByte : at::kBFloat16), "packed weights are all bf16 or all 8-bit");
    sizes.back() = n;
    outs.push_back(at::empty(sizes, input.options().dtype(wide ? at::kFloat : at::kBFloat16)));
    layers.push_back({w.const_data_ptr(), numbers(scales[i], n, "scale"), numbers(biases[i], n, "bias"),
                      outs.back().mutable_data_ptr(), n});
  }
  run(static_cast<const uint16_t*>(x.const_data_ptr()), layers, shape);
  return outs;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& bias,
                  int64_t num_out, bool wide) {
  return linears(input, weight, scale, bias, num_out, wide)[0];
}

bool is_fast() { return fast_here(); }

// Bytes on large pages where the system has them: with small ones a core waits for the TLB more than for memory.
at::Tensor large(int64_t num_bytes) {
  constexpr size_t kPage = size_t{1} << 21;
  TORCH_CHECK_VALUE(num_bytes >= 0, num_bytes, " bytes of memory");
  size_t size = (static_cast<size_t>(num_bytes) / kPage + 1) * kPage;
  void* memory = std::aligned_alloc(kPage, size);
  TORCH_CHECK(memory, "no memory for ", num_bytes, " bytes of weights");
#if defined(__linux__)
  madvise(memory, size, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
  return at::from_blob(memory, {num_bytes}, [](void* at) { std::free(at); }, at::TensorOptions().dtype(at::kByte));
}

at::Tensor hold(const at::Tensor& input) { return input.clone(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(lengthwise, m) {
  const auto tags = std::vector<at::Tag>{at::Tag::pt2_compliant_tag};
  m.def("linear(Tensor input, Tensor weight, Tensor scale, Tensor bias, int num_out, bool wide) -> Tensor", tags);
  m.def("linears(Tensor input, Tensor[] weights, Tensor[] scales, Tensor[] biases, int[] num_outs, bool wide) -> Tensor[]",
        tags);
  m.def("linear_is_fast() -> bool", is_fast);
  m.def("large(int num_bytes) -> Tensor", large);
  m.def("hold(Tensor input) -> Tensor");  // a copy that a compiler cannot see through: what all layers use is computed once
}

TORCH_LIBRARY_IMPL(lengthwise, CPU, m) {
  m.impl("linear", linear);
  m.impl("linears", linears);
  m.impl("hold", hold);
}
