// The matrix registers of Intel's AMX: eight of 16 rows × 64 bytes, and products of two of them
// added to a third.
//
// TDPBF16PS adds to each float of a register the products of 32 pairs of bfloat16 numbers, TDPBSUD
// those of 64 pairs of bytes; both take as many cycles as the left factor has rows. The right
// factor holds in each row 16 columns of 32 bits: two or four steps of k side by side. A process
// must ask the kernel of its system for them once (Linux 5.16).
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512F__) && defined(__linux__)
#define AMX 1

#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// What the registers of this thread hold while it lives: left factors and sums of two tiles of
// rows. Registers 0, 1 and 4 have the first one's rows, 2, 3 and 5 the second one's, 6 and 7 are
// right factors.
class TileShapes {
  public:
    ~TileShapes() {
        if (first_) _tile_release();
    }

    // The tiles' heights from now on; their sums are zero. To tell the registers waits for all that
    // they are doing.
    void set(int64_t first, int64_t second) {
        if (first == first_ && second == second_) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            return;
        }
        first_ = first, second_ = second;
        alignas(64) Configuration of;
        const int64_t rows[8] = {first, first, second, second, first, second, 16, 16};
        for (int i = 0; i < 8; ++i) of.rows[i] = (uint8_t)rows[i];
        asm volatile(
            "" ::"r"(&of)
            : "memory");  // all of it is there: the intrinsic names its first eight bytes alone
        _tile_loadconfig(&of);
    }

  private:
    struct Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    };
    int64_t first_ = 0, second_ = 0;
};

// What was stored before is in memory for what the registers load from now on, which GCC's
// intrinsics do not tell it.
inline void store_first() { asm volatile("" ::: "memory"); }

inline bool may_use_amx() {
    static const bool granted =
        !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILE_DATA */);
    return granted;
}

}  // namespace

#else
#define AMX 0
static inline bool may_use_amx() { return false; }
#endif
