// The codecs' kernels: bytes in, a blob out, and back. No state and no memory of their own, so any thread may call them.
//
//   int64_t lc_encode_X(in, n, out, room)   the blob's bytes; -1: it does not fit into `room`; -2: a value cannot be held
//   int lc_decode_X(blob, m, out, n)        0; -1: this is no blob of `n` bytes
//
// Each has one portable body and, where that gains, one for AVX-512; they make the same blobs. Which runs is decided once, by
// the processor, or by a test (lc_use_portable). What lies behind a blob, within `room`, may change.
//
// Values are those of one machine: words are as it stores them, and blobs are read where they were written.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define LC_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,f16c,popcnt,bmi2")))
#endif

#define LC_BODY static inline __attribute__((always_inline))

namespace {

constexpr int64_t kNoRoom = -1, kRefused = -2;

bool portable_only = false;

bool has_avx512() {
#if defined(__x86_64__)
  static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2");
  return found && !portable_only;
#else
  return false;
#endif
}

template <typename T>
LC_BODY T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
LC_BODY void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// ---- zero values: a bit for every word, the words that are not zero, the bytes after the last whole word ----

template <typename Word>
struct ZeroValue {
  static constexpr int64_t kWord = sizeof(Word);

  // Words from `i` on, which is a multiple of 8, with `kept` words of them written. Returns the end of those, or nullptr.
  static uint8_t* encode_from(int64_t i, const uint8_t* in, int64_t words, uint8_t* mask, uint8_t* kept, uint8_t* end) {
    for (; i < words; i += 8) {
      int64_t count = std::min<int64_t>(8, words - i);
      unsigned bits = 0;
      if (kept + 8 * kWord <= end) {
        for (int64_t k = 0; k < count; ++k) {
          Word word = load<Word>(in + (i + k) * kWord);
          store(kept, word);
          kept += word ? kWord : 0;
          bits |= static_cast<unsigned>(word != 0) << k;
        }
      } else {
        for (int64_t k = 0; k < count; ++k) {
          Word word = load<Word>(in + (i + k) * kWord);
          if (!word) continue;
          if (kept + kWord > end) return nullptr;
          store(kept, word);
          kept += kWord;
          bits |= 1u << k;
        }
      }
      mask[i / 8] = static_cast<uint8_t>(bits);
    }
    return kept;
  }

  // Returns the end of what was used of `kept`, or nullptr: the mask names more than there is.
  static const uint8_t* decode_from(
      int64_t i, uint8_t* out, int64_t words, const uint8_t* mask, const uint8_t* kept, const uint8_t* end) {
    for (; i < words; i += 8) {
      int64_t count = std::min<int64_t>(8, words - i);
      unsigned bits = mask[i / 8];
      if (count < 8 && bits >> count) return nullptr;
      if (kept + 8 * kWord <= end) {  // without a branch on the data
        for (int64_t k = 0; k < count; ++k) {
          auto is_kept = static_cast<Word>(bits >> k & 1);
          store(out + (i + k) * kWord, static_cast<Word>(load<Word>(kept) * is_kept));
          kept += is_kept * kWord;
        }
        continue;
      }
      if (kept + std::popcount(bits) * kWord > end) return nullptr;
      for (int64_t k = 0; k < count; ++k) {
        Word word = 0;
        if (bits >> k & 1) {
          word = load<Word>(kept);
          kept += kWord;
        }
        store(out + (i + k) * kWord, word);
      }
    }
    return kept;
  }

#if defined(__x86_64__)
  static constexpr int64_t kLanes = 64 / kWord;

  LC_AVX512 static uint64_t nonzero(__m512i v) {
    if constexpr (kWord == 1) return _mm512_test_epi8_mask(v, v);
    if constexpr (kWord == 2) return _mm512_test_epi16_mask(v, v);
    if constexpr (kWord == 4) return _mm512_test_epi32_mask(v, v);
    if constexpr (kWord == 8) return _mm512_test_epi64_mask(v, v);
  }
  LC_AVX512 static __m512i compress(uint64_t m, __m512i v) {
    if constexpr (kWord == 1) return _mm512_maskz_compress_epi8(m, v);
    if constexpr (kWord == 2) return _mm512_maskz_compress_epi16(static_cast<__mmask32>(m), v);
    if constexpr (kWord == 4) return _mm512_maskz_compress_epi32(static_cast<__mmask16>(m), v);
    if constexpr (kWord == 8) return _mm512_maskz_compress_epi64(static_cast<__mmask8>(m), v);
  }
  LC_AVX512 static __m512i expand(uint64_t m, __m512i v) {
    if constexpr (kWord == 1) return _mm512_maskz_expand_epi8(m, v);
    if constexpr (kWord == 2) return _mm512_maskz_expand_epi16(static_cast<__mmask32>(m), v);
    if constexpr (kWord == 4) return _mm512_maskz_expand_epi32(static_cast<__mmask16>(m), v);
    if constexpr (kWord == 8) return _mm512_maskz_expand_epi64(static_cast<__mmask8>(m), v);
  }

  LC_AVX512 static uint8_t* encode_wide(const uint8_t* in, int64_t words, uint8_t* mask, uint8_t* kept, uint8_t* end) {
    int64_t i = 0;
    for (; i + kLanes <= words && kept + 64 <= end; i += kLanes) {
      __m512i v = _mm512_loadu_si512(in + i * kWord);
      uint64_t m = nonzero(v);
      std::memcpy(mask + i / 8, &m, kLanes / 8);
      _mm512_storeu_si512(kept, compress(m, v));  // whole: a store of some lanes is slow on some processors
      kept += _mm_popcnt_u64(m) * kWord;
    }
    return encode_from(i, in, words, mask, kept, end);
  }

  LC_AVX512 static const uint8_t* decode_wide(
      uint8_t* out, int64_t words, const uint8_t* mask, const uint8_t* kept, const uint8_t* end) {
    int64_t i = 0;
    for (; i + kLanes <= words && kept + 64 <= end; i += kLanes) {
      uint64_t m = 0;
      std::memcpy(&m, mask + i / 8, kLanes / 8);
      _mm512_storeu_si512(out + i * kWord, expand(m, _mm512_loadu_si512(kept)));
      kept += _mm_popcnt_u64(m) * kWord;
    }
    return decode_from(i, out, words, mask, kept, end);
  }
#endif

  static int64_t encode(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
    int64_t words = n / kWord, tail = n % kWord, mask_bytes = (words + 7) / 8;
    if (mask_bytes + tail > room) return kNoRoom;
    uint8_t *kept = out + mask_bytes, *end = out + room - tail;
#if defined(__x86_64__)
    uint8_t* last = has_avx512() ? encode_wide(in, words, out, kept, end) : encode_from(0, in, words, out, kept, end);
#else
    uint8_t* last = encode_from(0, in, words, out, kept, end);
#endif
    if (!last) return kNoRoom;
    std::memcpy(last, in + words * kWord, tail);
    return last + tail - out;
  }

  static int decode(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
    int64_t words = n / kWord, tail = n % kWord, mask_bytes = (words + 7) / 8;
    if (m < mask_bytes + tail) return -1;
    const uint8_t *kept = blob + mask_bytes, *end = blob + m - tail;
#if defined(__x86_64__)
    const uint8_t* last =
        has_avx512() ? decode_wide(out, words, blob, kept, end) : decode_from(0, out, words, blob, kept, end);
#else
    const uint8_t* last = decode_from(0, out, words, blob, kept, end);
#endif
    if (last != end) return -1;
    std::memcpy(out + words * kWord, end, tail);
    return 0;
  }
};

// ---- bits: bytes that are 0 or 1, eight in one; a flag for every 4096 of them, which are as they were where others occur ----

constexpr int64_t kBitBlock = 4096;

LC_BODY bool pack_bits_body(const uint8_t* in, int64_t n, uint8_t* out) {
  uint64_t seen = 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t bytes = load<uint64_t>(in + i);
    seen |= bytes;
    out[i / 8] = static_cast<uint8_t>((bytes * 0x0102040810204080ull) >> 56);
  }
  unsigned rest = 0, others = 0;
  for (int64_t k = 0; i + k < n; ++k) {
    others |= in[i + k];
    rest |= (in[i + k] & 1u) << k;
  }
  if (i < n) out[i / 8] = static_cast<uint8_t>(rest);
  return !(seen & 0xFEFEFEFEFEFEFEFEull) && !(others & 0xFE);
}

LC_BODY bool unpack_bits_body(const uint8_t* in, int64_t n, uint8_t* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t spread = (in[i / 8] * 0x8040201008040201ull) & 0x8080808080808080ull;
    // The lowest bit came to the highest byte's top: mirrored by the multiplier, in order after the swap.
    store(out + i, __builtin_bswap64(spread >> 7));
  }
  for (int64_t k = 0; i + k < n; ++k) out[i + k] = in[i / 8] >> k & 1;
  return i == n || !(in[i / 8] >> (n - i));
}

#if defined(__x86_64__)
LC_AVX512 bool pack_bits_wide(const uint8_t* in, int64_t n, uint8_t* out) {
  __m512i seen = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    __m512i v = _mm512_loadu_si512(in + i);
    seen = _mm512_or_si512(seen, v);
    store<uint64_t>(out + i / 8, _mm512_test_epi8_mask(v, v));
  }
  bool rest = pack_bits_body(in + i, n - i, out + i / 8);
  return rest && _mm512_cmpgt_epu8_mask(seen, _mm512_set1_epi8(1)) == 0;
}

LC_AVX512 bool unpack_bits_wide(const uint8_t* in, int64_t n, uint8_t* out) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    _mm512_storeu_si512(out + i, _mm512_maskz_set1_epi8(load<uint64_t>(in + i / 8), 1));
  return unpack_bits_body(in + i / 8, n - i, out + i);
}
#endif

int64_t encode_bits(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
  int64_t blocks = (n + kBitBlock - 1) / kBitBlock, at = blocks;
  if (at > room) return kNoRoom;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t count = std::min(kBitBlock, n - b * kBitBlock), packed = (count + 7) / 8;
    const uint8_t* block = in + b * kBitBlock;
    if (at + packed > room) return kNoRoom;
#if defined(__x86_64__)
    bool fits = has_avx512() ? pack_bits_wide(block, count, out + at) : pack_bits_body(block, count, out + at);
#else
    bool fits = pack_bits_body(block, count, out + at);
#endif
    out[b] = fits ? 1 : 0;
    if (!fits) {
      if (at + count > room) return kNoRoom;
      std::memcpy(out + at, block, count);
    }
    at += fits ? packed : count;
  }
  return at;
}

int decode_bits(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
  int64_t blocks = (n + kBitBlock - 1) / kBitBlock, at = blocks;
  if (at > m) return -1;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t count = std::min(kBitBlock, n - b * kBitBlock), stored = blob[b] ? (count + 7) / 8 : count;
    if (blob[b] > 1 || at + stored > m) return -1;
    uint8_t* block = out + b * kBitBlock;
    if (blob[b]) {
#if defined(__x86_64__)
      bool good = has_avx512() ? unpack_bits_wide(blob + at, count, block) : unpack_bits_body(blob + at, count, block);
#else
      bool good = unpack_bits_body(blob + at, count, block);
#endif
      if (!good) return -1;
    } else {
      std::memcpy(block, blob + at, count);
    }
    at += stored;
  }
  return at == m ? 0 : -1;
}

// ---- signs: of single precision, whether it is above zero (Gist's binarize); comes back as 1 or 0 ----

LC_BODY void signs_body(const float* in, int64_t words, uint8_t* out) {
  for (int64_t i = 0; i < words; i += 8) {
    unsigned bits = 0;
    for (int64_t k = 0; k < std::min<int64_t>(8, words - i); ++k) bits |= static_cast<unsigned>(in[i + k] > 0) << k;
    out[i / 8] = static_cast<uint8_t>(bits);
  }
}

LC_BODY void unsign_body(const uint8_t* in, int64_t words, float* out) {
  for (int64_t i = 0; i < words; ++i) out[i] = static_cast<float>(in[i / 8] >> (i % 8) & 1);
}

#if defined(__x86_64__)
LC_AVX512 void signs_wide(const float* in, int64_t words, uint8_t* out) {
  int64_t i = 0;
  for (; i + 16 <= words; i += 16)
    store<uint16_t>(out + i / 8, _mm512_cmp_ps_mask(_mm512_loadu_ps(in + i), _mm512_setzero_ps(), _CMP_GT_OQ));
  signs_body(in + i, words - i, out + i / 8);
}

LC_AVX512 void unsign_wide(const uint8_t* in, int64_t words, float* out) {
  int64_t i = 0;
  for (; i + 16 <= words; i += 16)
    _mm512_storeu_ps(out + i, _mm512_maskz_mov_ps(load<uint16_t>(in + i / 8), _mm512_set1_ps(1.0f)));
  unsign_body(in + i / 8, words - i, out + i);
}
#endif

int64_t encode_signs(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
  int64_t words = n / 4, bytes = (words + 7) / 8, tail = n % 4;
  if (bytes + tail > room) return kNoRoom;
  auto* values = reinterpret_cast<const float*>(in);
#if defined(__x86_64__)
  has_avx512() ? signs_wide(values, words, out) : signs_body(values, words, out);
#else
  signs_body(values, words, out);
#endif
  std::memcpy(out + bytes, in + words * 4, tail);
  return bytes + tail;
}

int decode_signs(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
  int64_t words = n / 4, bytes = (words + 7) / 8, tail = n % 4;
  if (m != bytes + tail) return -1;
  auto* values = reinterpret_cast<float*>(out);
#if defined(__x86_64__)
  has_avx512() ? unsign_wide(blob, words, values) : unsign_body(blob, words, values);
#else
  unsign_body(blob, words, values);
#endif
  std::memcpy(out + words * 4, blob + bytes, tail);
  return 0;
}

// ---- casts of single precision: to nearest, ties to even; what would become infinite is refused ----

// Exponent and mantissa bits of a small format; `Finite`: it has no infinities, and one NaN (E4M3).
template <typename Code, int E, int M, bool Finite>
struct Small {
  using Stored = Code;
  static constexpr bool kFinite = Finite;
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr uint32_t kNan = Finite ? (1u << (E + M)) - 1 : (((1u << E) - 1) << M) | (1u << (M - 1));
  static constexpr uint32_t kInf = ((1u << E) - 1) << M;
  static constexpr uint32_t kTop = Finite ? kNan - 1 : kInf - 1;  // the largest finite number
  static constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
  static constexpr uint32_t kSubnormal = static_cast<uint32_t>(127 - kBias + 23 - M + 1) << 23;  // its last place is theirs
  static constexpr uint32_t kShift = static_cast<uint32_t>(127 - kBias) << M;

  LC_BODY uint32_t encode(uint32_t word) {
    uint32_t sign = word >> 31 << (E + M), size = word & 0x7FFFFFFFu;
    uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + std::bit_cast<float>(kSubnormal)) - kSubnormal;
    uint32_t rounded = size + ((1u << (22 - M)) - 1) + (size >> (23 - M) & 1);
    uint32_t normal = (rounded >> (23 - M)) - kShift;
    uint32_t code = size < kLeastNormal ? small : normal;
    uint32_t special = size > 0x7F800000u ? kNan : kInf;
    bool is_special = Finite ? size > 0x7F800000u : size >= 0x7F800000u;
    return (is_special ? special : code) | sign;
  }

  LC_BODY uint32_t decode(uint32_t code) {
    uint32_t sign = code >> (E + M) << 31, size = code & ((1u << (E + M)) - 1);
    uint32_t wide = size << (23 - M);
    uint32_t normal = wide + (static_cast<uint32_t>(127 - kBias) << 23);
    // One more than their exponent, less it: without a subnormal operand, which a thread may be set to take for zero.
    uint32_t small = std::bit_cast<uint32_t>(
        std::bit_cast<float>(wide + kLeastNormal) - std::bit_cast<float>(static_cast<uint32_t>(kLeastNormal)));
    uint32_t value = size < (1u << M) ? small : normal;
    bool is_special = Finite ? size == kNan : size >= kInf;
    return (is_special ? 0x7F800000u | (Finite ? 0x400000u : wide & 0x7FFFFFu) : value) | sign;
  }
};

struct Brain {
  using Stored = uint16_t;
  static constexpr uint32_t kTop = 0x7F7F;
  static constexpr bool kFinite = false;
  LC_BODY uint32_t encode(uint32_t word) {
    uint32_t sign = word >> 31 << 15, size = word & 0x7FFFFFFFu;
    uint32_t rounded = (size + 0x7FFFu + (size >> 16 & 1)) >> 16;
    return (size > 0x7F800000u ? 0x7FC0u : rounded) | sign;
  }
  LC_BODY uint32_t decode(uint32_t code) {
    return code << 16;
  }
};

using Half = Small<uint16_t, 5, 10, false>;
using Fp8E5M2 = Small<uint8_t, 5, 2, false>;
using Fp8E4M3 = Small<uint8_t, 4, 3, true>;
using Fp10 = Small<uint16_t, 5, 4, false>;

// The larger of `most` and a number's size, unless it is one that every format has; without a choice, or loops of it would not
// be vectors. What the largest becomes, no other becomes more than.
template <typename Format>
LC_BODY int32_t larger(int32_t most, uint32_t word) {
  auto size = static_cast<int32_t>(word & 0x7FFFFFFFu);
  constexpr int32_t kSpecial = Format::kFinite ? 0x7F800001 : 0x7F800000;
  return std::max(most, size & ((size - kSpecial) >> 31));
}

template <typename Format>
LC_BODY bool holds(int32_t most) {
  return static_cast<uint32_t>(most) < 0x7F800000u && Format::encode(static_cast<uint32_t>(most)) <= Format::kTop;
}

template <typename Format>
LC_BODY bool cast_body(const uint8_t* __restrict in, int64_t words, uint8_t* __restrict out) {
  auto* from = reinterpret_cast<const uint32_t*>(in);
  auto* to = reinterpret_cast<typename Format::Stored*>(out);
  int32_t most = 0;
  for (int64_t i = 0; i < words; ++i) {
    most = larger<Format>(most, from[i]);
    to[i] = static_cast<typename Format::Stored>(Format::encode(from[i]));
  }
  return holds<Format>(most);
}

template <typename Format>
LC_BODY void uncast_body(const uint8_t* __restrict in, int64_t words, uint8_t* __restrict out) {
  auto* from = reinterpret_cast<const typename Format::Stored*>(in);
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t i = 0; i < words; ++i) to[i] = Format::decode(from[i]);
}

template <typename Format>
bool cast_plain(const uint8_t* in, int64_t words, uint8_t* out) {
  return cast_body<Format>(in, words, out);
}
template <typename Format>
void uncast_plain(const uint8_t* in, int64_t words, uint8_t* out) {
  uncast_body<Format>(in, words, out);
}
#if defined(__x86_64__)
template <typename Format>
LC_AVX512 bool cast_wide(const uint8_t* in, int64_t words, uint8_t* out) {
  return cast_body<Format>(in, words, out);
}
template <typename Format>
LC_AVX512 void uncast_wide(const uint8_t* in, int64_t words, uint8_t* out) {
  uncast_body<Format>(in, words, out);
}
#endif

// The codes, then the bytes after the last whole word.
template <typename Format>
struct Cast {
  static constexpr int64_t kCode = sizeof(typename Format::Stored);

  static int64_t encode(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
    int64_t words = n / 4, tail = n % 4;
    if (words * kCode + tail > room) return kNoRoom;
#if defined(__x86_64__)
    bool held = has_avx512() ? cast_wide<Format>(in, words, out) : cast_plain<Format>(in, words, out);
#else
    bool held = cast_plain<Format>(in, words, out);
#endif
    if (!held) return kRefused;
    std::memcpy(out + words * kCode, in + words * 4, tail);
    return words * kCode + tail;
  }

  static int decode(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
    int64_t words = n / 4, tail = n % 4;
    if (m != words * kCode + tail) return -1;
#if defined(__x86_64__)
    has_avx512() ? uncast_wide<Format>(blob, words, out) : uncast_plain<Format>(blob, words, out);
#else
    uncast_plain<Format>(blob, words, out);
#endif
    std::memcpy(out + words * 4, blob + words * kCode, tail);
    return 0;
  }
};

// Ten bits a value, three in a word (Gist's DPR): word i of a block has values i, i + 1024 and i + 2048.
constexpr int64_t kTens = 1024;

LC_BODY bool tens_body(const uint32_t* __restrict in, int64_t words, uint32_t* __restrict out) {
  int32_t most = 0;
  for (int64_t i = 0; i < words; ++i) most = larger<Fp10>(most, in[i]);
  if (!holds<Fp10>(most)) return false;
  int64_t i = 0;
  for (; i + 3 * kTens <= words; i += 3 * kTens, in += 3 * kTens, out += kTens)
    for (int64_t k = 0; k < kTens; ++k)
      out[k] = Fp10::encode(in[k]) | Fp10::encode(in[k + kTens]) << 10 |
          Fp10::encode(in[k + 2 * kTens]) << 20;
  int64_t rest = words - i, third = (rest + 2) / 3;
  for (int64_t k = 0; k < third; ++k) {
    uint32_t word = Fp10::encode(in[k]);
    if (k + third < rest) word |= Fp10::encode(in[k + third]) << 10;
    if (k + 2 * third < rest) word |= Fp10::encode(in[k + 2 * third]) << 20;
    out[k] = word;
  }
  return true;
}

LC_BODY void untens_body(const uint32_t* __restrict in, int64_t words, uint32_t* __restrict out) {
  int64_t i = 0;
  for (; i + 3 * kTens <= words; i += 3 * kTens, out += 3 * kTens, in += kTens)
    for (int64_t k = 0; k < kTens; ++k) {
      out[k] = Fp10::decode(in[k] & 1023);
      out[k + kTens] = Fp10::decode(in[k] >> 10 & 1023);
      out[k + 2 * kTens] = Fp10::decode(in[k] >> 20 & 1023);
    }
  int64_t rest = words - i, third = (rest + 2) / 3;
  for (int64_t k = 0; k < third; ++k) {
    out[k] = Fp10::decode(in[k] & 1023);
    if (k + third < rest) out[k + third] = Fp10::decode(in[k] >> 10 & 1023);
    if (k + 2 * third < rest) out[k + 2 * third] = Fp10::decode(in[k] >> 20 & 1023);
  }
}

bool tens_plain(const uint32_t* in, int64_t words, uint32_t* out) {
  return tens_body(in, words, out);
}
void untens_plain(const uint32_t* in, int64_t words, uint32_t* out) {
  untens_body(in, words, out);
}
#if defined(__x86_64__)
LC_AVX512 bool tens_wide(const uint32_t* in, int64_t words, uint32_t* out) {
  return tens_body(in, words, out);
}
LC_AVX512 void untens_wide(const uint32_t* in, int64_t words, uint32_t* out) {
  untens_body(in, words, out);
}
#endif

int64_t tens_bytes(int64_t words) {
  return (words / (3 * kTens) * kTens + (words % (3 * kTens) + 2) / 3) * 4;
}

int64_t encode_fp10(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
  int64_t words = n / 4, tail = n % 4, bytes = tens_bytes(words);
  if (bytes + tail > room) return kNoRoom;
  auto* from = reinterpret_cast<const uint32_t*>(in);
  auto* to = reinterpret_cast<uint32_t*>(out);
#if defined(__x86_64__)
  bool held = has_avx512() ? tens_wide(from, words, to) : tens_plain(from, words, to);
#else
  bool held = tens_plain(from, words, to);
#endif
  if (!held) return kRefused;
  std::memcpy(out + bytes, in + words * 4, tail);
  return bytes + tail;
}

int decode_fp10(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
  int64_t words = n / 4, tail = n % 4, bytes = tens_bytes(words);
  if (m != bytes + tail) return -1;
  auto* from = reinterpret_cast<const uint32_t*>(blob);
  auto* to = reinterpret_cast<uint32_t*>(out);
#if defined(__x86_64__)
  has_avx512() ? untens_wide(from, words, to) : untens_plain(from, words, to);
#else
  untens_plain(from, words, to);
#endif
  std::memcpy(out + words * 4, blob + bytes, tail);
  return 0;
}

// ---- packed floats: four bits instead of the exponent's eight, by a dictionary of 15 and an escape; lossless ----
//
// A block of up to 65,536 values: 16 bytes of dictionary, 4 of how many escapes follow (kAsItIs: none, the block is as it was),
// 32 bytes of codes for every 64 values (value k and k + 32 share a byte), signs with mantissas in whole bytes, the exponents
// that the dictionary lacks.

constexpr int64_t kPackBlock = 65536, kGroup = 64, kHeader = 20;
constexpr uint32_t kAsItIs = 0xFFFFFFFFu;
constexpr uint8_t kEscape = 15;

template <typename Word>
struct Packed {
  static constexpr int64_t kWord = sizeof(Word), kRest = kWord - 1;  // bytes of sign and mantissa
  static constexpr int kMantissa = kWord == 4 ? 23 : 7;

  LC_BODY uint8_t exponent(Word word) {
    return static_cast<uint8_t>(word >> kMantissa);
  }
  LC_BODY uint32_t rest(Word word) {
    uint32_t mantissa = word & ((1u << kMantissa) - 1);
    return mantissa | static_cast<uint32_t>(word >> (8 * kWord - 1)) << kMantissa;
  }
  LC_BODY Word joined(uint8_t exponent, uint32_t rest) {
    uint32_t mantissa = rest & ((1u << kMantissa) - 1);
    return static_cast<Word>(
        mantissa | static_cast<uint32_t>(exponent) << kMantissa | (rest >> kMantissa & 1u) << (8 * kWord - 1));
  }

  // One group of up to 64 values. Returns the end of the escapes, or nullptr: no room.
  LC_BODY uint8_t* encode_group(
      const uint8_t* in, int64_t count, const uint8_t* code_of, uint8_t* codes, uint8_t* rests, uint8_t* escapes,
      const uint8_t* end) {
    uint8_t code[kGroup] = {};
    for (int64_t k = 0; k < count; ++k) {
      Word word = load<Word>(in + k * kWord);
      uint8_t e = exponent(word);
      code[k] = code_of[e];
      if (code[k] == kEscape) {
        if (escapes >= end) return nullptr;
        *escapes++ = e;
      }
      uint32_t r = rest(word);
      for (int64_t b = 0; b < kRest; ++b) rests[k * kRest + b] = static_cast<uint8_t>(r >> (8 * b));
    }
    for (int64_t k = 0; k < kGroup / 2; ++k) codes[k] = static_cast<uint8_t>(code[k] | code[k + kGroup / 2] << 4);
    return escapes;
  }

  LC_BODY const uint8_t* decode_group(
      uint8_t* out, int64_t count, const uint8_t* dictionary, const uint8_t* codes, const uint8_t* rests,
      const uint8_t* escapes, const uint8_t* end) {
    for (int64_t k = 0; k < count; ++k) {
      uint8_t code = k < kGroup / 2 ? codes[k] & 15 : codes[k - kGroup / 2] >> 4;
      uint8_t e = dictionary[code];
      if (code == kEscape) {
        if (escapes >= end) return nullptr;
        e = *escapes++;
      }
      uint32_t r = 0;
      for (int64_t b = 0; b < kRest; ++b) r |= static_cast<uint32_t>(rests[k * kRest + b]) << (8 * b);
      store(out + k * kWord, joined(e, r));
    }
    return escapes;
  }

#if defined(__x86_64__)
  LC_AVX512 static __m512i rest_bytes() {  // of four-byte lanes the lower three, side by side
    alignas(64) uint8_t index[64] = {};
    for (int k = 0; k < 48; ++k) index[k] = static_cast<uint8_t>(k / 3 * 4 + k % 3);
    return _mm512_load_si512(index);
  }
  LC_AVX512 static __m512i rest_lanes() {
    alignas(64) uint8_t index[64] = {};
    for (int k = 0; k < 64; ++k) index[k] = static_cast<uint8_t>(k / 4 * 3 + std::min(k % 4, 2));
    return _mm512_load_si512(index);
  }

  // All groups but the last, whose stores would pass their ends; the escapes have room for a value of all of them.
  LC_AVX512 static uint8_t* encode_wide(
      const uint8_t* in, int64_t groups, const uint8_t* code_of, uint8_t* codes, uint8_t* rests, uint8_t* escapes) {
    __m512i t0 = _mm512_loadu_si512(code_of), t1 = _mm512_loadu_si512(code_of + 64);
    __m512i t2 = _mm512_loadu_si512(code_of + 128), t3 = _mm512_loadu_si512(code_of + 192);
    __m512i three = rest_bytes();
    for (int64_t g = 0; g < groups; ++g, in += kGroup * kWord, codes += kGroup / 2, rests += kGroup * kRest) {
      __m512i e;
      if constexpr (kWord == 4) {
        __m512i v[4];
        __m128i part[4];
        for (int q = 0; q < 4; ++q) {
          v[q] = _mm512_loadu_si512(in + 64 * q);
          part[q] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(v[q], 23));
          __m512i r = _mm512_or_si512(
              _mm512_and_si512(v[q], _mm512_set1_epi32(0x7FFFFF)),
              _mm512_and_si512(_mm512_srli_epi32(v[q], 8), _mm512_set1_epi32(0x800000)));
          _mm512_storeu_si512(rests + 48 * q, _mm512_permutexvar_epi8(three, r));
        }
        e = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_set_m128i(part[1], part[0])), _mm256_set_m128i(part[3], part[2]), 1);
      } else {
        __m512i v0 = _mm512_loadu_si512(in), v1 = _mm512_loadu_si512(in + 64);
        __m256i e0 = _mm512_cvtepi16_epi8(_mm512_srli_epi16(v0, 7)), e1 = _mm512_cvtepi16_epi8(_mm512_srli_epi16(v1, 7));
        __m512i sign = _mm512_set1_epi16(0x80), mantissa = _mm512_set1_epi16(0x7F);
        auto r = [&](__m512i v) LC_AVX512 {
          return _mm512_cvtepi16_epi8(_mm512_or_si512(
              _mm512_and_si512(v, mantissa), _mm512_and_si512(_mm512_srli_epi16(v, 8), sign)));
        };
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rests), r(v0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rests + 32), r(v1));
        e = _mm512_inserti64x4(_mm512_castsi256_si512(e0), e1, 1);
      }
      __m512i low = _mm512_permutex2var_epi8(t0, e, t1), high = _mm512_permutex2var_epi8(t2, e, t3);
      __m512i code = _mm512_mask_blend_epi8(_mm512_movepi8_mask(e), low, high);
      __mmask64 missing = _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(kEscape));
      if (missing) {
        _mm512_storeu_si512(escapes, _mm512_maskz_compress_epi8(missing, e));
        escapes += _mm_popcnt_u64(missing);
      }
      __m256i lower = _mm512_castsi512_si256(code), upper = _mm512_extracti64x4_epi64(code, 1);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_or_si256(lower, _mm256_slli_epi16(upper, 4)));
    }
    return escapes;
  }

  // All groups but the last. Returns the end of the escapes used, or nullptr: there are fewer.
  LC_AVX512 static const uint8_t* decode_wide(
      uint8_t* out, int64_t& group, int64_t groups, const uint8_t* dictionary, const uint8_t* codes, const uint8_t* rests,
      const uint8_t* escapes, const uint8_t* end) {
    __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(dictionary)));
    __m512i lanes = rest_lanes();
    for (; group < groups; ++group) {
      __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + group * (kGroup / 2)));
      __m256i nibble = _mm256_set1_epi8(15);
      __m512i code = _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm256_and_si256(both, nibble)),
          _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), 1);
      __m512i e = _mm512_shuffle_epi8(words, code);
      __mmask64 missing = _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(kEscape));
      if (missing) {
        int64_t left = end - escapes;
        if (_mm_popcnt_u64(missing) > left) return nullptr;
        __mmask64 there = left >= 64 ? ~0ull : (1ull << left) - 1;
        e = _mm512_mask_expand_epi8(e, missing, _mm512_maskz_loadu_epi8(there, escapes));
        escapes += _mm_popcnt_u64(missing);
      }
      const uint8_t* r = rests + group * kGroup * kRest;
      uint8_t* to = out + group * kGroup * kWord;
      if constexpr (kWord == 4) {
        __m128i part[4] = {
            _mm512_castsi512_si128(e), _mm512_extracti32x4_epi32(e, 1), _mm512_extracti32x4_epi32(e, 2),
            _mm512_extracti32x4_epi32(e, 3)};
        for (int q = 0; q < 4; ++q) {
          __m512i x = _mm512_permutexvar_epi8(lanes, _mm512_loadu_si512(r + 48 * q));
          __m512i wide = _mm512_slli_epi32(_mm512_cvtepu8_epi32(part[q]), 23);
          // The top byte of a lane is one of its others again: only what is wanted of it is kept.
          __m512i mantissa = _mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFF));
          __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x800000)), 8);
          _mm512_storeu_si512(to + 64 * q, _mm512_or_si512(wide, _mm512_or_si512(mantissa, sign)));
        }
      } else {
        for (int q = 0; q < 2; ++q) {
          __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(r + 32 * q)));
          __m256i half = q ? _mm512_extracti64x4_epi64(e, 1) : _mm512_castsi512_si256(e);
          __m512i wide = _mm512_slli_epi16(_mm512_cvtepu8_epi16(half), 7);
          __m512i mantissa = _mm512_and_si512(x, _mm512_set1_epi16(0x7F));
          __m512i sign = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8);
          _mm512_storeu_si512(to + 64 * q, _mm512_or_si512(wide, _mm512_or_si512(mantissa, sign)));
        }
      }
    }
    return escapes;
  }
#endif

  // The 15 exponents that a sample has most often, ascending by value among equals. Returns the share of the sample they cover.
  static double dictionary_of(const uint8_t* in, int64_t count, uint8_t* dictionary, uint8_t* code_of) {
    uint32_t seen[256] = {};
    int64_t step = std::max<int64_t>(1, count / 4096), sampled = 0;
    for (int64_t k = 0; k < count; k += step, ++sampled) ++seen[exponent(load<Word>(in + k * kWord))];
    std::memset(code_of, kEscape, 256);
    std::memset(dictionary, 0, 16);
    int64_t covered = 0;
    for (uint8_t code = 0; code < kEscape; ++code) {
      int best = static_cast<int>(std::max_element(seen, seen + 256) - seen);
      if (!seen[best]) break;
      covered += seen[best];
      seen[best] = 0;
      dictionary[code] = static_cast<uint8_t>(best);
      code_of[best] = code;
    }
    return sampled ? static_cast<double>(covered) / static_cast<double>(sampled) : 1;
  }

  static int64_t encode_block(const uint8_t* in, int64_t count, uint8_t* out, int64_t room) {
    uint8_t code_of[256];
    int64_t groups = (count + kGroup - 1) / kGroup, raw = count * kWord;
    int64_t fixed = kHeader + groups * (kGroup / 2) + count * kRest;
    if (room < kHeader) return kNoRoom;
    double covered = dictionary_of(in, count, out, code_of);
    // Escapes beyond this make the block longer than it was.
    int64_t most = std::min(room, kHeader + raw) - fixed;
    uint8_t *codes = out + kHeader, *rests = codes + groups * (kGroup / 2), *begin = rests + count * kRest;
    uint8_t* escapes = nullptr;
    if (most >= 0 && (1 - covered) * static_cast<double>(count) <= 2.0 * static_cast<double>(most)) {
      escapes = begin;
      int64_t g = 0;
#if defined(__x86_64__)
      // Whole stores of escapes need 64 bytes behind the last: so many groups at a time as cannot use up more than there are.
      while (has_avx512() && escapes && g < groups - 1) {
        int64_t spare = begin + most - escapes - 64;
        int64_t some = std::min(groups - 1 - g, spare / kGroup);
        if (some <= 0) break;
        escapes = encode_wide(
            in + g * kGroup * kWord, some, code_of, codes + g * (kGroup / 2), rests + g * kGroup * kRest, escapes);
        g += some;
      }
#endif
      for (; escapes && g < groups; ++g)
        escapes = encode_group(
            in + g * kGroup * kWord, std::min(kGroup, count - g * kGroup), code_of, codes + g * (kGroup / 2),
            rests + g * kGroup * kRest, escapes, begin + most);
    }
    if (escapes) {
      store(out + 16, static_cast<uint32_t>(escapes - begin));
      return escapes - out;
    }
    if (kHeader + raw > room) return kNoRoom;
    std::memset(out, 0, 16);
    store(out + 16, kAsItIs);
    std::memcpy(out + kHeader, in, raw);
    return kHeader + raw;
  }

  // Returns the bytes of the block, or -1.
  static int64_t decode_block(const uint8_t* blob, int64_t m, uint8_t* out, int64_t count) {
    if (m < kHeader) return -1;
    uint32_t many = load<uint32_t>(blob + 16);
    int64_t groups = (count + kGroup - 1) / kGroup, raw = count * kWord;
    if (many == kAsItIs) {
      if (m < kHeader + raw) return -1;
      std::memcpy(out, blob + kHeader, raw);
      return kHeader + raw;
    }
    int64_t bytes = kHeader + groups * (kGroup / 2) + count * kRest + many;
    if (many > count || bytes > m) return -1;
    const uint8_t *codes = blob + kHeader, *rests = codes + groups * (kGroup / 2), *escapes = rests + count * kRest;
    const uint8_t* end = blob + bytes;
    int64_t g = 0;
#if defined(__x86_64__)
    if (has_avx512()) escapes = decode_wide(out, g, groups - 1, blob, codes, rests, escapes, end);
#endif
    for (; escapes && g < groups; ++g)
      escapes = decode_group(
          out + g * kGroup * kWord, std::min(kGroup, count - g * kGroup), blob, codes + g * (kGroup / 2),
          rests + g * kGroup * kRest, escapes, end);
    return escapes == end ? bytes : -1;
  }

  static int64_t encode(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
    int64_t words = n / kWord, tail = n % kWord, at = 0;
    for (int64_t i = 0; i < words; i += kPackBlock) {
      int64_t bytes = encode_block(in + i * kWord, std::min(kPackBlock, words - i), out + at, room - at);
      if (bytes < 0) return bytes;
      at += bytes;
    }
    if (at + tail > room) return kNoRoom;
    std::memcpy(out + at, in + words * kWord, tail);
    return at + tail;
  }

  static int decode(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
    int64_t words = n / kWord, tail = n % kWord, at = 0;
    for (int64_t i = 0; i < words; i += kPackBlock) {
      int64_t bytes = decode_block(blob + at, m - at, out + i * kWord, std::min(kPackBlock, words - i));
      if (bytes < 0) return -1;
      at += bytes;
    }
    if (m != at + tail) return -1;
    std::memcpy(out + words * kWord, blob + at, tail);
    return 0;
  }
};

// ---- sparse rows (Gist's SSDC): CSR of rows of 256 words, so that a column is a byte; lossless ----
//
// Two bytes for each row: how many of its words are not zero; their columns; the words; the bytes after the last whole word.

constexpr int64_t kRow = 256;

int64_t encode_rows(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {
  int64_t words = n / 4, tail = n % 4, rows = (words + kRow - 1) / kRow, total = 0;
  if (2 * rows + tail > room) return kNoRoom;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = in + r * kRow * 4;
    int64_t count = 0, length = std::min(kRow, words - r * kRow);
    for (int64_t k = 0; k < length; ++k) count += load<uint32_t>(row + 4 * k) != 0;
    store(out + 2 * r, static_cast<uint16_t>(count));
    total += count;
  }
  int64_t bytes = 2 * rows + 5 * total + tail;
  if (bytes > room) return kNoRoom;
  uint8_t *columns = out + 2 * rows, *kept = columns + total, *const columns_end = kept;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = in + r * kRow * 4;
    int64_t length = std::min(kRow, words - r * kRow);
    for (int64_t k = 0; k < length && columns < columns_end; ++k) {
      uint32_t word = load<uint32_t>(row + 4 * k);
      *columns = static_cast<uint8_t>(k);
      store(kept, word);
      columns += word != 0;
      kept += word ? 4 : 0;
    }
  }
  std::memcpy(out + bytes - tail, in + words * 4, tail);
  return bytes;
}

int decode_rows(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {
  int64_t words = n / 4, tail = n % 4, rows = (words + kRow - 1) / kRow, total = 0;
  if (m < 2 * rows + tail) return -1;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t count = load<uint16_t>(blob + 2 * r);
    if (count > std::min(kRow, words - r * kRow)) return -1;
    total += count;
  }
  if (m != 2 * rows + 5 * total + tail) return -1;
  const uint8_t *columns = blob + 2 * rows, *kept = columns + total;
  std::memset(out, 0, words * 4);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t count = load<uint16_t>(blob + 2 * r), length = std::min(kRow, words - r * kRow);
    for (int64_t k = 0; k < count; ++k, kept += 4) {
      if (*columns >= length) return -1;
      std::memcpy(out + (r * kRow + *columns++) * 4, kept, 4);
    }
  }
  std::memcpy(out + words * 4, kept, tail);
  return 0;
}

}  // namespace

#define LC_EXPORT(name, encoder, decoder)                                                          \
  int64_t lc_encode_##name(const uint8_t* in, int64_t n, uint8_t* out, int64_t room) {             \
    return encoder(in, n, out, room);                                                              \
  }                                                                                                \
  int lc_decode_##name(const uint8_t* blob, int64_t m, uint8_t* out, int64_t n) {                  \
    return decoder(blob, m, out, n);                                                               \
  }

extern "C" {

LC_EXPORT(zvc1, ZeroValue<uint8_t>::encode, ZeroValue<uint8_t>::decode)
LC_EXPORT(zvc2, ZeroValue<uint16_t>::encode, ZeroValue<uint16_t>::decode)
LC_EXPORT(zvc4, ZeroValue<uint32_t>::encode, ZeroValue<uint32_t>::decode)
LC_EXPORT(zvc8, ZeroValue<uint64_t>::encode, ZeroValue<uint64_t>::decode)
LC_EXPORT(bits, encode_bits, decode_bits)
LC_EXPORT(signs, encode_signs, decode_signs)
LC_EXPORT(fp16, Cast<Half>::encode, Cast<Half>::decode)
LC_EXPORT(bf16, Cast<Brain>::encode, Cast<Brain>::decode)
LC_EXPORT(fp8_e4m3, Cast<Fp8E4M3>::encode, Cast<Fp8E4M3>::decode)
LC_EXPORT(fp8_e5m2, Cast<Fp8E5M2>::encode, Cast<Fp8E5M2>::decode)
LC_EXPORT(fp10, encode_fp10, decode_fp10)
LC_EXPORT(pack32, Packed<uint32_t>::encode, Packed<uint32_t>::decode)
LC_EXPORT(pack16, Packed<uint16_t>::encode, Packed<uint16_t>::decode)
LC_EXPORT(ssdc, encode_rows, decode_rows)

// Whether the portable bodies run on every processor from here on. Returns whether there are others on this one.
int lc_use_portable(int on) {
  portable_only = false;
  bool wide = has_avx512();
  portable_only = on != 0;
  return wide;
}
}
