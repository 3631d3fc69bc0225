// Paged attention of the CPU: keys and values in panels of 16 tokens, so that one vector holds as many scores as it has lanes.
//
// A panel is what a matrix product reads next: rows of the dimension that is summed over, columns side by side. Keys have a row
// per number of the head and a column per token; values a row per token and a column per number. bf16, int8 and fp8 keep two
// rows interleaved, as the bf16 product of AVX-512 wants them. Where panels do not come out even (block size and V a multiple
// of 16, K of 2) a block keeps its tokens one after another instead, which are rearranged when they are read.
//
// One item of work is some queries of one row and one KV head over a range of positions, with the running softmax of Milakov
// and Gimelshein (2018): scores of TILE positions, their exponentials, the weighted sum of values. Few queries over many
// positions are cut at fixed positions and merged, so that no result depends on the other rows or on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6, VECS = 4;  // floats in a vector; rows and vectors of the sums that the registers hold
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6, VECS = 2;
#else
constexpr int W = 4, ROWS = 4, VECS = 4;
#endif
#if defined(__AVX512BF16__)
constexpr bool HAS_DOT = true;  // products of pairs of bf16
#else
constexpr bool HAS_DOT = false;
#endif
constexpr int PANEL = 16, TILE = 256, SPLIT = 256, MOST_ROWS = 64, AHEAD = 4;
constexpr float LOG2E = 1.4426950408889634f, NONE = -INFINITY;

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
using c10::BFloat16;
using c10::Half;
using fp8 = c10::Float8_e4m3fn;

inline vec load(const float* from) {
  vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, vec x) { std::memcpy(to, &x, sizeof x); }
inline vec all(float x) { return x - vec{}; }

// ---- numbers -------------------------------------------------------------------------------------------------------------

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float number(float x) { return x; }
inline float number(Half x) { return static_cast<float>(x); }
inline float number(BFloat16 x) { return as_float(uint32_t{x.x} << 16); }
inline float number(int8_t x) { return x; }
inline float number(fp8 x) {  // fp32 has the same order of bits: move them, then set the exponent right
  return as_float((uint32_t(x.x & 0x7f) << 20) | (uint32_t(x.x & 0x80) << 24)) * 0x1p120f;
}

template <class KV> constexpr bool PAIRED = !std::is_same_v<KV, float> && !std::is_same_v<KV, Half>;
template <class KV> constexpr bool SCALED = std::is_same_v<KV, int8_t> || std::is_same_v<KV, fp8>;
template <class KV> constexpr float LARGEST = std::is_same_v<KV, int8_t> ? 127.f : 448.f;

template <class KV> inline KV quantised(float x) {
  if constexpr (std::is_same_v<KV, int8_t>) return static_cast<int8_t>(std::min(std::max(std::nearbyint(x), -127.f), 127.f));
  else return KV(std::min(std::max(x, -LARGEST<KV>), LARGEST<KV>));
}

// Index of (row, column) in a panel of `columns`.
template <bool PAIRED> inline int64_t place(int row, int column, int columns) {
  return PAIRED ? int64_t(row / 2) * columns * 2 + column * 2 + row % 2 : int64_t(row) * columns + column;
}

#if defined(__AVX512VBMI__)
// 64 numbers of a byte to bf16: both halves of a magnitude are looked up, the sign is put back.
template <class KV> void unpack_bytes(const KV* from, int size, uint16_t* to) {
  alignas(64) static const auto table = [] {
    std::array<uint8_t, 256> bytes{};
    for (int i = 0; i < 128; ++i) {
      KV x;
      std::memcpy(&x, &i, 1);
      bytes[i] = as_bits(number(x)) >> 16, bytes[128 + i] = as_bits(number(x)) >> 24;
    }
    return bytes;
  }();
  const __m512i low0 = _mm512_loadu_si512(&table[0]), low1 = _mm512_loadu_si512(&table[64]);
  const __m512i high0 = _mm512_loadu_si512(&table[128]), high1 = _mm512_loadu_si512(&table[192]);
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);  // unpacking goes by 16 bytes
  for (int i = 0; i < size; i += 64) {
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
    const __m512i magnitude = std::is_same_v<KV, int8_t> ? _mm512_abs_epi8(x) : x;  // of which the look-up takes 7 bits
    const __m512i low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    const __m512i high = _mm512_permutex2var_epi8(high0, magnitude, high1);
    const __m512i signed_high = _mm512_ternarylogic_epi64(high, x, sign, 0xf8);  // high | (x & sign)
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, signed_high));
    _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low, signed_high));
  }
}
#endif

// What the product cannot read as it is stored: bytes become bf16, fp16 becomes fp32.
template <class KV> void unpack(const KV* from, int size, float* to) {
  int i = 0;
  if constexpr (SCALED<KV>) {
    auto* out = reinterpret_cast<uint16_t*>(to);
#if defined(__AVX512VBMI__)
    unpack_bytes(from, i = size / 64 * 64, out);
#endif
    for (; i < size; ++i) out[i] = as_bits(number(from[i])) >> 16;  // exact: at most 8 bits of each are in use
  } else {
#if defined(__AVX512F__)
    for (; i < size; i += W) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
    for (; i < size; i += W) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < size; ++i) to[i] = number(from[i]);
  }
}

// 2^x = whole * (1 + part) for x in [-127, 127]; 2^-127 gives 0, which is what a masked score becomes.
struct Power { vec whole, part; };
inline Power power(vec x) {
  const vec shifted = x + 12582912.f, f = x - (shifted - 12582912.f);  // 1.5 * 2^23: the sum is rounded to a whole number
  vec p = f * 0.00015461447765119374f + 0.0013390866806730628f;
  p = p * f + 0.009618056938052177f;
  p = p * f + 0.055503569543361664f;
  p = p * f + 0.24022650718688965f;
  p = (p * f + 0.6931471824645996f) * f;
  return {(vec)(((ivec)shifted << 23) + 0x3f800000), p};
}
inline vec exp2(vec x) {
  const Power p = power(x < -127.f ? all(-127.f) : x);  // NaN stays
  return p.whole + p.whole * p.part;
}
inline float exp2(float x) { return exp2(all(x))[0]; }
inline vec tanh(vec x) {  // (e^2x - 1) / (e^2x + 1)
  x = x * (2 * LOG2E);
  const Power p = power(x < -60.f ? all(-60.f) : x > 60.f ? all(60.f) : x);
  const vec e = p.whole * p.part + (p.whole - 1.f);
  return e / (e + 2.f);
}

// ---- the product -----------------------------------------------------------------------------------------------------------

// What a row of the right side holds: fp32, or words of two bf16, for which the left side has two fp32 or such a word too.
enum Mode { FLOATS, PAIRS, DOT };
struct Ahead {
  const void* at;
  int stride;  // bytes
};

// sums (MR, NV vectors) = [sums +] left (MR, panels * steps) @ right: for each panel NV pointers to rows of a vector, `stride`
// words apart. With FETCH it asks for a line of `ahead` for each vector that it reads.
template <int MR, int NV, Mode MODE, bool FETCH>
void product(const float* left, int left_stride, const float* const* right, int stride, int panels, int steps, float* sums,
             int sums_stride, bool add, const Ahead* ahead) {
  constexpr int STEP = MODE == PAIRS ? 2 : 1;
  vec sum[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) sum[m][v] = add ? load(sums + m * sums_stride + v * W) : vec{};
  for (int p = 0; p < panels; ++p, right += NV, ahead += FETCH ? NV : 0)
    for (int k = 0; k < steps; ++k, left += STEP) {
      vec row[NV], odd[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        row[v] = load(right[v] + int64_t(k) * stride);
        if (FETCH) __builtin_prefetch(static_cast<const char*>(ahead[v].at) + int64_t(k) * ahead[v].stride, 0, 2);  // to L2
        if (MODE == PAIRS) odd[v] = (vec)((ivec)row[v] & int32_t(0xffff0000)), row[v] = (vec)((ivec)row[v] << 16);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const float* one = left + m * left_stride;
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
#if defined(__AVX512BF16__)
          if constexpr (MODE == DOT) {
            sum[m][v] = (vec)_mm512_dpbf16_ps((__m512)sum[m][v], (__m512bh)_mm512_set1_epi32(as_bits(*one)), (__m512bh)row[v]);
            continue;
          }
#endif
          sum[m][v] += *one * row[v];
          if (MODE == PAIRS) sum[m][v] += one[1] * odd[v];
        }
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(sums + m * sums_stride + v * W, sum[m][v]);
}

using Product = void (*)(const float*, int, const float* const*, int, int, int, float*, int, bool, const Ahead*);
template <int NV, Mode MODE, bool FETCH, int... I> constexpr auto sizes(std::integer_sequence<int, I...>) {
  return std::array<Product, sizeof...(I)>{product<I + 1, NV, MODE, FETCH>...};
}
template <int NV, Mode MODE>
void products(int rows, const float* left, int left_stride, const float* const* right, int stride, int panels, int steps,
              float* sums, int sums_stride, bool add, const Ahead* ahead) {
  static constexpr auto of_size = sizes<NV, MODE, false>(std::make_integer_sequence<int, ROWS>{});
  static constexpr auto fetching = sizes<NV, MODE, true>(std::make_integer_sequence<int, ROWS>{});
  constexpr int MOST = MODE == PAIRS ? ROWS - 2 : ROWS;  // that needs registers for the odd ones too
  for (int left_over = rows; left_over > 0; ahead = nullptr) {
    const int size = left_over <= MOST ? left_over : left_over < 2 * MOST ? (left_over + 1) / 2 : MOST;
    (ahead ? fetching : of_size)[size - 1](left, left_stride, right, stride, panels, steps, sums, sums_stride, add, ahead);
    left += size * left_stride, sums += size * sums_stride, left_over -= size;
  }
}

// ---- one item of work ------------------------------------------------------------------------------------------------------

struct Pool {
  const void *key, *value;
  const float *key_scale, *value_scale;
  int block_size, num_heads, k_dim, v_dim;
  bool panels;
};
struct Call {
  Pool pool;
  const void* query;
  void* out;
  int64_t num_tokens, token_stride, head_stride;  // of query
  int num_heads;
  const int32_t *starts, *contexts, *tables;
  int64_t table_width;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  float* partials;
};
struct Item {  // queries [query, query + num_queries) of a row and a KV head over positions [first, last)
  int row, head, query, num_queries, first, last;
  int64_t partial;  // -1: the result is whole. Else where in Call::partials (rows, v_dim + 2): sums, then maximum and total
};

inline int padded(int dim) { return (dim + PANEL - 1) / PANEL * PANEL; }

float* room(int64_t size) {
  thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < size + 64) kept.resize(size + 64);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) & ~uintptr_t{63});
}

// The stored panel of a position, of keys or values.
template <class KV> inline const KV* stored(const Call& c, const void* from, int dim, int row, int head, int position) {
  const int size = c.pool.block_size;
  const int64_t block = int64_t(c.tables[row * c.table_width + position / size]) * c.pool.num_heads + head;
  return static_cast<const KV*>(from) + (block * (size / PANEL) + position % size / PANEL) * PANEL * dim;
}

template <class KV> constexpr bool DIRECT = std::is_same_v<KV, float> || std::is_same_v<KV, BFloat16>;

template <class KV> struct Tile {  // panels of up to TILE positions of one row and head, as the product reads them
  static constexpr int PER_WORD = PAIRED<KV> ? 2 : 1;
  const float *keys[TILE / PANEL], *values[TILE / PANEL];
  float *key_scale, *value_scale, *key_room, *value_room;

  void read(const Call& c, const Item& it, int start, int from, int to) {  // panels [from, to) after position `start`
    const Pool& pool = c.pool;
    const int context = c.contexts[it.row], size = pool.block_size, v_dim = padded(pool.v_dim);
    const int32_t* table = c.tables + it.row * c.table_width;
    const int key_words = (pool.k_dim + PER_WORD - 1) / PER_WORD * PANEL, value_words = v_dim * PANEL / PER_WORD;
    for (int p = from; p < to; ++p) {
      const int at = start + p * PANEL, valid = std::min(PANEL, context - at);
      float *key_out = key_room + p * key_words, *value_out = value_room + p * value_words;
      if (!pool.panels) {
        std::memset(key_out, 0, key_words * 4);
        scattered(c, it, table, at, valid, key_out, value_out);
      } else {
        const KV* key = stored<KV>(c, pool.key, pool.k_dim, it.row, it.head, at);
        const KV* value = stored<KV>(c, pool.value, pool.v_dim, it.row, it.head, at);
        if constexpr (DIRECT<KV>) {
          keys[p] = reinterpret_cast<const float*>(key), values[p] = reinterpret_cast<const float*>(value);
          if (valid == PANEL) continue;
          std::memcpy(value_out, value, value_words * 4);
        } else {
          unpack<KV>(key, pool.k_dim * PANEL, key_out);
          unpack<KV>(value, pool.v_dim * PANEL, value_out);
        }
      }
      if (!DIRECT<KV> || !pool.panels) keys[p] = key_out;
      values[p] = value_out;
      for (int j = valid; j < PANEL; ++j)  // old values of others may be anything: 0 * inf is not 0
        for (int d = 0; d < v_dim; ++d) put(value_out, place<PAIRED<KV>>(j, d, v_dim), 0.f);
    }
    if constexpr (SCALED<KV>)
      for (int j = from * PANEL; j < to * PANEL; ++j) {
        const int at = start + j;
        const int64_t block = at < context ? int64_t(table[at / size]) * pool.num_heads + it.head : 0;
        key_scale[j] = at < context ? pool.key_scale[block * size + at % size] : 0.f;
        value_scale[j] = at < context ? pool.value_scale[block * size + at % size] : 0.f;
      }
  }

  // The same of a block that keeps token after token.
  static void scattered(const Call& c, const Item& it, const int32_t* table, int at, int valid, float* key_out,
                        float* value_out) {
    const Pool& pool = c.pool;
    for (int j = 0; j < PANEL; ++j) {
      const int position = std::max(at + std::min(j, valid - 1), it.first);  // those outside weigh nothing
      const int64_t block = int64_t(table[position / pool.block_size]) * pool.num_heads + it.head;
      const int64_t token = block * pool.block_size + position % pool.block_size;
      const KV* key = static_cast<const KV*>(pool.key) + token * pool.k_dim;
      const KV* value = static_cast<const KV*>(pool.value) + token * pool.v_dim;
      for (int d = 0; d < pool.k_dim; ++d) put(key_out, place<PAIRED<KV>>(d, j, PANEL), number(key[d]));
      for (int d = 0; d < pool.v_dim; ++d) put(value_out, place<PAIRED<KV>>(j, d, padded(pool.v_dim)), number(value[d]));
    }
  }
  static void put(float* out, int64_t index, float x) {
    if constexpr (PAIRED<KV>) reinterpret_cast<uint16_t*>(out)[index] = as_bits(x) >> 16;
    else out[index] = x;
  }
};

// Scores of one row of queries over columns [from, to) of a tile become weights; returns by how much older sums shrink.
template <Mode MODE>
float weigh(const Call& c, float* scores, int from, int to, int low, int high, const float* key_scale, const float* value_scale,
            float* weights, float& most, float& sum) {
  const vec scale = all(c.softcap > 0 ? c.scale / c.softcap : c.scale * LOG2E);
  ivec lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  vec top = all(NONE);
  for (int i = from; i < to; i += W) {
    vec s = load(scores + i) * scale;
    if (key_scale) s *= load(key_scale + i);
    if (c.softcap > 0) s = tanh(s) * (c.softcap * LOG2E);
    if (i < low || i + W > high) s = (lane + i >= low) & (lane + i < high) ? s : all(NONE);
    store(scores + i, s);
    top = s > top ? s : top;
  }
  float tile_most = top[0];
  for (int i = 1; i < W; ++i) tile_most = std::max(tile_most, top[i]);
  const float old = most;
  most = std::max(most, tile_most);
  const vec shift = all(most);
  vec total{};
  for (int i = from; i < to; i += W) {
    vec w = exp2(load(scores + i) - shift);
    total += w;
    if (value_scale) w *= load(value_scale + i);
#if defined(__AVX512BF16__)
    if constexpr (MODE == DOT) {
      const __m256bh half = _mm512_cvtneps_pbh((__m512)w);
      std::memcpy(weights + i / 2, &half, 32);
      continue;
    }
#endif
    store(weights + i, w);
  }
  const float shrink = old == most ? 1.f : exp2(old - most);
  float added = 0.f;
  for (int i = 0; i < W; ++i) added += total[i];
  sum = sum * shrink + added;
  return shrink;
}

template <class Query, class KV, Mode MODE> void attend(const Call& c, const Item& it, const Item* next) {
  const Pool& pool = c.pool;
  const int group = c.num_heads / pool.num_heads, rows = it.num_queries * group;
  constexpr int PER_WORD = Tile<KV>::PER_WORD, DEPTH = PANEL / PER_WORD, STEP = MODE == PAIRS ? 2 : 1;
  constexpr int STRIDE = TILE + VECS * W, COLUMNS = VECS * W / PANEL;
  const int steps = (pool.k_dim + PER_WORD - 1) / PER_WORD, width = steps * STEP, v_dim = padded(pool.v_dim);
  float* queries = room(int64_t(rows) * (width + STRIDE + TILE + v_dim + 2) + 2 * TILE + TILE * (steps + v_dim));
  float *scores = queries + rows * width, *weights = scores + rows * STRIDE, *sums = weights + rows * TILE;
  float *most = sums + rows * v_dim, *total = most + rows;
  Tile<KV> tile;
  tile.key_scale = total + rows, tile.value_scale = tile.key_scale + TILE;
  tile.key_room = tile.value_scale + TILE, tile.value_room = tile.key_room + TILE * steps;

  const int64_t token = c.starts[it.row] + it.query;
  for (int m = 0; m < rows; ++m) {
    const Query* from = static_cast<const Query*>(c.query) + (token + m / group) * c.token_stride +
                        (it.head * group + m % group) * c.head_stride;
    float* to = queries + m * width;
    to[width - 1] = 0.f;  // the other half of an odd pair
    if constexpr (MODE == DOT) std::memcpy(to, from, pool.k_dim * 2);
    else for (int d = 0; d < pool.k_dim; ++d) to[d] = number(from[d]);
    most[m] = NONE, total[m] = 0.f;
  }
  std::memset(sums, 0, rows * v_dim * 4);

  const int position = c.contexts[it.row] - (c.starts[it.row + 1] - c.starts[it.row]) + it.query;  // of the first query
  const float* table[VECS * TILE / PANEL];
  Ahead ahead[VECS * TILE / PANEL];
  const bool direct = DIRECT<KV> && pool.panels;
  const int fetched = !next || !pool.panels ? 0 : direct ? AHEAD : TILE / PANEL;  // panels of the next item
  const bool fetch = direct || fetched;
  const char *next_keys[TILE / PANEL], *next_values[TILE / PANEL];
  for (int start = it.first / TILE * TILE; start < it.last; start += TILE) {
    const int from = std::max(it.first - start, 0) / PANEL, to = (std::min(it.last - start, TILE) + PANEL - 1) / PANEL;
    tile.read(c, it, start, from, to);
    // What is read next is fetched on the way. Panels that need no unpacking: keys COLUMNS panels ahead, then the first values,
    // values AHEAD panels ahead, then the first keys of the next item. Others: all of the next item.
    for (int v = 0, p; v < fetched; ++v) {
      p = std::min(next->first + v * PANEL, next->last - 1);
      next_keys[v] = reinterpret_cast<const char*>(stored<KV>(c, pool.key, pool.k_dim, next->row, next->head, p));
      next_values[v] = reinterpret_cast<const char*>(stored<KV>(c, pool.value, pool.v_dim, next->row, next->head, p));
      if constexpr (SCALED<KV>) {
        const int64_t at = (next_keys[v] - static_cast<const char*>(pool.key)) / pool.k_dim;
        __builtin_prefetch(pool.key_scale + at), __builtin_prefetch(pool.value_scale + at);
      }
    }
    for (int p = from; p < to; p += COLUMNS) {
      for (int v = 0; v < VECS; ++v) {
        const int q = p + COLUMNS + v * W / PANEL;
        table[v] = tile.keys[std::min(p + v * W / PANEL, to - 1)] + v * W % PANEL;
        if (direct) ahead[v] = {q < to ? tile.keys[q] : tile.values[std::min(from + q - to, to - 1)], 64};
        else if (fetched) ahead[v] = {next_keys[(q - COLUMNS - from) % fetched], 32};
      }
      products<VECS, MODE>(rows, queries, width, table, PANEL, 1, steps, scores + p * PANEL, STRIDE, false,
                           fetch ? ahead : nullptr);
    }
    for (int m = 0; m < rows; ++m) {
      const int at = position + m / group;
      const int low = std::max(it.first, c.window ? at - c.window + 1 : 0) - start, high = std::min(it.last, at + 1) - start;
      float* row = weights + m * TILE;
      if (low >= to * PANEL || high <= from * PANEL || low >= high) {
        std::memset(row + from * DEPTH * STEP, 0, (to - from) * DEPTH * STEP * 4);
        continue;
      }
      const float shrink = weigh<MODE>(c, scores + m * STRIDE, from * PANEL, to * PANEL, low, high,
                                      SCALED<KV> ? tile.key_scale : nullptr, SCALED<KV> ? tile.value_scale : nullptr, row,
                                      most[m], total[m]);
      if (shrink != 1.f)
        for (int d = 0; d < v_dim; d += W) store(sums + m * v_dim + d, load(sums + m * v_dim + d) * shrink);
    }
    for (int d = 0; d < v_dim;) {
      const bool wide = d + VECS * W <= v_dim;
      const int vecs = wide ? VECS : PANEL / W;
      for (int p = from; p < to; ++p)
        for (int v = 0; v < vecs; ++v) {
          table[(p - from) * vecs + v] = tile.values[p] + d + v * W;
          Ahead& a = ahead[(p - from) * vecs + v];
          if (direct && (p + AHEAD < to || !next)) a = {tile.values[std::min(p + AHEAD, to - 1)] + d + v * W, v_dim * 4};
          else if (direct) a = {next_keys[p + AHEAD - std::max(to, from + AHEAD)] + (d / W + v) * DEPTH * 64, 64};
          else if (fetched) a = {next_values[p - from] + (d / W + v) * DEPTH * 2 * W, 2 * W};
        }
      const auto add = wide ? products<VECS, MODE> : products<PANEL / W, MODE>;
      add(rows, weights + from * DEPTH * STEP, TILE, table, v_dim, to - from, DEPTH, sums + d, v_dim, true,
          fetch ? ahead : nullptr);
      d += vecs * W;
    }
  }
  for (int m = 0; m < rows; ++m) {
    if (it.partial >= 0) {
      float* to = c.partials + it.partial + m * (v_dim + 2);
      std::memcpy(to, sums + m * v_dim, v_dim * 4);
      to[v_dim] = most[m], to[v_dim + 1] = total[m];
    } else {
      Query* to = static_cast<Query*>(c.out) + ((token + m / group) * c.num_heads + it.head * group + m % group) * pool.v_dim;
      for (int d = 0; d < pool.v_dim; ++d) to[d] = static_cast<Query>(sums[m * v_dim + d] / total[m]);
    }
  }
}

template <class Query> void merge(const Call& c, const Item& it, int splits) {  // it: the first of them, one after another
  const int group = c.num_heads / c.pool.num_heads, rows = it.num_queries * group;
  const int v_dim = c.pool.v_dim, width = padded(v_dim) + 2;
  for (int m = 0; m < rows; ++m) {
    const float* part = c.partials + it.partial + m * width;
    const int64_t next = int64_t(rows) * width;
    float most = NONE, total = 0.f;
    for (int s = 0; s < splits; ++s) most = std::max(most, part[s * next + width - 2]);
    float* sums = room(v_dim);
    std::fill_n(sums, v_dim, 0.f);
    for (int s = 0; s < splits; ++s) {
      const float share = part[s * next + width - 2] == NONE ? 0.f : exp2(part[s * next + width - 2] - most);
      total += share * part[s * next + width - 1];
      for (int d = 0; d < v_dim; ++d) sums[d] += share * part[s * next + d];
    }
    const int64_t token = c.starts[it.row] + it.query + m / group;
    Query* to = static_cast<Query*>(c.out) + (token * c.num_heads + it.head * group + m % group) * v_dim;
    for (int d = 0; d < v_dim; ++d) to[d] = static_cast<Query>(sums[d] / total);
  }
}

template <class Query, class KV> void run(Call& c, int num_rows) {
  const int group = c.num_heads / c.pool.num_heads, most_queries = std::max(1, MOST_ROWS / group);
  std::vector<Item> items, cut;
  std::vector<int> num_splits;
  int64_t partial = 0, read = 0;  // positions that are attended, for each head
  auto over = [&](int row, int query, int num_queries, int first, int last, bool split) {
    const int from = first / SPLIT, splits = split ? (last + SPLIT - 1) / SPLIT - from : 1;
    const int64_t size = splits > 1 ? int64_t(num_queries) * group * (padded(c.pool.v_dim) + 2) : 0;
    read += int64_t(last - first) * ((num_queries * group + ROWS - 1) / ROWS);
    for (int head = 0; head < c.pool.num_heads; ++head)
      for (int s = 0; s < splits; ++s) {
        Item it{row, head, query, num_queries, first, last, -1};
        if (splits > 1) {
          it.first = std::max(first, (from + s) * SPLIT), it.last = std::min(last, (from + s + 1) * SPLIT);
          it.partial = partial, partial += size;
          if (!s) cut.push_back(it), num_splits.push_back(splits);
        }
        items.push_back(it);
      }
  };
  auto clear = [&](int64_t first, int64_t last) {  // what attends nothing is zeros
    const int64_t size = int64_t(c.num_heads) * c.pool.v_dim * sizeof(Query);
    std::memset(static_cast<char*>(c.out) + first * size, 0, (last - first) * size);
  };
  clear(c.starts[num_rows], c.num_tokens);
  for (int row = num_rows - 1; row >= 0; --row) {  // chunks come last and take longest: they go first, last queries before all
    const int count = c.starts[row + 1] - c.starts[row], context = c.contexts[row];
    if (!context) {
      clear(c.starts[row], c.starts[row + 1]);
      continue;
    }
    for (int query = (count - 1) / most_queries * most_queries; query >= 0; query -= most_queries) {
      const int num_queries = std::min(most_queries, count - query), last = context - count + query + num_queries;
      over(row, query, num_queries, c.window ? std::max(0, last - num_queries - c.window + 1) : 0, last, count <= most_queries);
    }
  }
  std::vector<float> partials(partial);
  c.partials = partials.data();
  constexpr Mode MODE = !PAIRED<KV> ? FLOATS : HAS_DOT && std::is_same_v<Query, BFloat16> ? DOT : PAIRS;
  const int64_t numbers = read * c.pool.num_heads * (c.pool.k_dim + c.pool.v_dim);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), 1 + numbers / 32768);
  auto each = [threads](int64_t count, auto work) {  // items differ: a thread that is done takes the next one
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) {
      for (int64_t i = next.fetch_add(1), then; i < count; i = then) {
        const bool known = i + 2 * threads < count;  // what comes next, to fetch it; the last ones go to whoever is free
        if (known) then = next.fetch_add(1);
        work(i, known ? then : count);
        if (!known) then = next.fetch_add(1);
      }
    });
  };
  each(items.size(), [&](int64_t i, int64_t then) {
    attend<Query, KV, MODE>(c, items[i], then < int64_t(items.size()) ? &items[then] : nullptr);
  });
  each(cut.size(), [&](int64_t i, int64_t) { merge<Query>(c, cut[i], num_splits[i]); });
}

// ---- storing ---------------------------------------------------------------------------------------------------------------

template <class From, class KV> void put(const Pool& pool, KV* to, float* scales, const From* from, int64_t slot, int head,
                                         bool is_key) {
  const int size = pool.block_size, dim = is_key ? pool.k_dim : pool.v_dim, offset = slot % size;
  const int64_t block = slot / size * pool.num_heads + head;
  float inverse = 1.f;
  if constexpr (SCALED<KV>) {
    float most = 1e-30f;
    for (int d = 0; d < dim; ++d) most = std::fabs(number(from[d])) <= most ? most : std::fabs(number(from[d]));
    scales[block * size + offset] = most / LARGEST<KV>;
    inverse = LARGEST<KV> / most;
  }
  to += block * size * dim;
  to += pool.panels ? offset / PANEL * PANEL * int64_t(dim) : offset * int64_t(dim);
  for (int d = 0; d < dim; ++d) {
    const int64_t at = !pool.panels ? d
                       : is_key     ? place<PAIRED<KV>>(d, offset % PANEL, PANEL)
                                    : place<PAIRED<KV>>(offset % PANEL, d, dim);
    if constexpr (SCALED<KV>) to[at] = quantised<KV>(number(from[d]) * inverse);
    else if constexpr (std::is_same_v<From, KV>) to[at] = from[d];
    else to[at] = static_cast<KV>(number(from[d]));
  }
}

// ---- operators -------------------------------------------------------------------------------------------------------------

using at::Tensor;
using Scales = const std::optional<Tensor>&;

template <class F> void by_query(at::ScalarType type, F f) {
  if (type == at::kFloat) f(float{});
  else if (type == at::kBFloat16) f(BFloat16{});
  else if (type == at::kHalf) f(Half{});
  else TORCH_CHECK(false, "queries, keys and values must be fp32, bf16 or fp16, not ", type);
}
template <class F> void by_kept(at::ScalarType type, F f) {
  if (type == at::kChar) f(int8_t{});
  else if (type == at::kFloat8_e4m3fn) f(fp8{});
  else by_query(type, f);
}

Pool described(const Tensor& key, const Tensor& value, Scales key_scale, Scales value_scale) {
  TORCH_CHECK(key.dim() == 4 && value.dim() == 4 && key.is_contiguous() && value.is_contiguous(),
              "a pool is (blocks, Hkv, size, dim) in one piece");
  auto scale = [](Scales s) { return s ? s->const_data_ptr<float>() : nullptr; };
  const int size = key.size(2);
  const bool panels = size % PANEL == 0 && value.size(3) % PANEL == 0 && key.size(3) % 2 == 0;
  return {key.const_data_ptr(), value.const_data_ptr(), scale(key_scale), scale(value_scale), size, int(key.size(1)),
          int(key.size(3)), int(value.size(3)), panels};
}

Tensor paged_attend(const Tensor& any_query, const Tensor& key_pool, const Tensor& value_pool, Scales key_scale,
                    Scales value_scale, const Tensor& query_start, const Tensor& context_len, const Tensor& block_tables,
                    double scale, int64_t window, double softcap) {
  const Tensor query = any_query.stride(2) == 1 ? any_query : any_query.contiguous();
  const Tensor starts = query_start.contiguous(), contexts = context_len.contiguous(), tables = block_tables.contiguous();
  Call c{described(key_pool, value_pool, key_scale, value_scale)};
  Tensor out = at::empty({query.size(0), query.size(1), c.pool.v_dim}, query.options());
  c.query = query.const_data_ptr(), c.out = out.mutable_data_ptr();
  c.token_stride = query.stride(0), c.head_stride = query.stride(1);
  c.num_tokens = query.size(0), c.num_heads = query.size(1);
  c.starts = starts.const_data_ptr<int32_t>(), c.contexts = contexts.const_data_ptr<int32_t>();
  c.tables = tables.const_data_ptr<int32_t>(), c.table_width = tables.size(1);
  c.scale = scale, c.window = window, c.softcap = softcap;
  TORCH_CHECK(query.size(2) == c.pool.k_dim, "queries of ", query.size(2), " numbers for keys of ", c.pool.k_dim);
  TORCH_CHECK(c.num_heads % c.pool.num_heads == 0, c.num_heads, " query heads for ", c.pool.num_heads, " KV heads");
  by_query(query.scalar_type(), [&](auto q) {
    by_kept(key_pool.scalar_type(), [&](auto kv) { run<decltype(q), decltype(kv)>(c, contexts.size(0)); });
  });
  return out;
}

void paged_store(const Tensor& any_key, const Tensor& any_value, const Tensor& any_slots, const Tensor& key_pool,
                 const Tensor& value_pool, Scales key_scale, Scales value_scale) {
  const Tensor key = any_key.stride(2) == 1 ? any_key : any_key.contiguous();
  const Tensor value = any_value.stride(2) == 1 ? any_value : any_value.contiguous(), slots = any_slots.contiguous();
  const Pool pool = described(key_pool, value_pool, key_scale, value_scale);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t num_slots = key_pool.size(0) * pool.block_size, per_token = int64_t(pool.num_heads) * (pool.k_dim + pool.v_dim);
  TORCH_CHECK(key.size(1) == pool.num_heads && key.size(2) == pool.k_dim && value.size(2) == pool.v_dim, "KV of another shape");
  by_query(key.scalar_type(), [&](auto from) {
    by_kept(key_pool.scalar_type(), [&](auto to) {
      using From = decltype(from);
      using KV = decltype(to);
      at::parallel_for(0, slots.size(0), std::max<int64_t>(1, 4096 / per_token), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          if (slot[i] < 0) continue;
          TORCH_CHECK(slot[i] < num_slots, "slot ", slot[i], " of a pool of ", num_slots);
          for (int h = 0; h < pool.num_heads; ++h) {
            put(pool, static_cast<KV*>(const_cast<void*>(pool.key)), const_cast<float*>(pool.key_scale),
                key.const_data_ptr<From>() + i * key.stride(0) + h * key.stride(1), slot[i], h, true);
            put(pool, static_cast<KV*>(const_cast<void*>(pool.value)), const_cast<float*>(pool.value_scale),
                value.const_data_ptr<From>() + i * value.stride(0) + h * value.stride(1), slot[i], h, false);
          }
        }
      });
    });
  });
}

// Ask for large pages behind a tensor that nothing was written to yet: blocks lie anywhere, and small pages miss the TLB.
void large_pages(const Tensor& tensor) {
#if defined(__linux__)
  constexpr uintptr_t PAGE = uintptr_t{1} << 21;
  const uintptr_t start = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()), end = start + tensor.nbytes();
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lengthwise, m) {
  m.def(
      "paged_attend(Tensor query, Tensor key_pool, Tensor value_pool, Tensor? key_scale, Tensor? value_scale, "
      "Tensor query_start, Tensor context_len, Tensor block_tables, float scale, int window, float softcap) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "paged_store(Tensor key, Tensor value, Tensor slots, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!)? key_scale, "
      "Tensor(d!)? value_scale) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def("large_pages(Tensor(a!) tensor) -> ()", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(lengthwise, CPU, m) {
  m.impl("paged_attend", paged_attend);
  m.impl("paged_store", paged_store);
  m.impl("large_pages", large_pages);
}
