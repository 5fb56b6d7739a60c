// Arguments of a linear layer, and the epilogues applied to its sums before they are stored, for
// every form of weights.
//
// Weights lie in panels of NR columns; a tile of rows × one panel ends here as two vectors per row.
// Gated epilogues take VW gate columns beside VW up columns and store VW results.
#pragma once

#include "argmax.h"
#include "norm.h"

#define NR (2 * VW)
// COMMIT_ROWS: up to so many a thread's sums are committed when all of its columns are done
#define COMMIT_ROWS 64
#define PREFETCH_ROWS 8
static_assert(ARGMAX_ROWS <= COMMIT_ROWS, "maxima are compared once, when sums are committed");

INLINE int64_t num_panels(int64_t n) { return (n + NR - 1) / NR; }

enum Epilogue { PLAIN = 0, ADD = 1, SWIGLU = 2, GEGLU_TANH = 3, ARGMAX = 4 };

struct LinearArguments {
    const float *x;        // [m, k] rows
    const void *weight;    // packed panels
    const void *scale;     // of quantised weights
    const float *bias;     // [n], padded to whole panels, or null
    const float *residual; // [m, n] for ADD, with y's stride
    float *y;  // [m, n], or [m, n / 2] for the gated epilogues, or [threads] ArgmaxSeen for ARGMAX
    char *workspace;  // shared by all threads, as large as the kernel says, or null where it says 0
    int64_t x_stride, y_stride;
    int64_t m, n, k;
    int32_t epilogue;
    int32_t uses_amx;  // where rows are more than a few
    Norm norm;         // that x goes through first
    const AttendArguments *ahead;  // the attention that comes next in the row of kernels, or null
};

// Write panels [n / WIDTH][depth][WIDTH] of value(row, i), where a row is one of the n outputs.
// Outputs past n are `blank`.
template <int WIDTH, class T, class Value>
void pack_panels(T *panels, int64_t n, int64_t depth, Value value, T blank = 0) {
    const int64_t count = (n + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < count; ++p)
        for (int64_t i = 0; i < depth; ++i)
            for (int64_t j = 0; j < WIDTH; ++j) {
                const int64_t row = p * WIDTH + j;
                panels[(p * depth + i) * WIDTH + j] = row < n ? (T)value(row, i) : blank;
            }
}

// Return the prefetch of the next attention; products of few rows fetch nothing, since they wait
// for memory themselves.
INLINE Prefetch &read_ahead(const LinearArguments &a, PoolThread *thread) {
    return thread->prefetch(a.m >= PREFETCH_ROWS ? a.ahead : nullptr);
}

// Return a row after its norm; `room` holds k floats. `goes_on`: the next row is read after it.
INLINE const float *input_row(const LinearArguments &a, int64_t row, bool goes_on, float *room) {
    const float *x = a.x + row * a.x_stride;
    if (!a.norm.weight) return x;
    normalise(a.norm, x, goes_on ? a.x_stride : 0, nullptr, a.k, room);
    return room;
}

// Return this thread's arguments: with ARGMAX its own ArgmaxSeen is the output.
INLINE LinearArguments of_thread(LinearArguments a, PoolThread *thread) {
    if (a.epilogue != ARGMAX) return a;
    ArgmaxSeen &seen = ArgmaxSeen::of(a.y, thread->part);
    seen.open(a.m, thread->row());
    a.y = (float *)seen.rows;
    return a;
}

// Where a tile's first row goes; bias and residual may be null. `width`: columns of the panel that
// exist.
struct Output {
    float *y;
    const float *bias, *residual;
    int64_t y_stride;  // the residual's too
    int width, epilogue;
    int32_t vector;  // the panel's first, counted from the row's beginning
};

INLINE Output at_panel(Output out, int64_t panel, int64_t n) {
    const int64_t column = panel * (out.epilogue == SWIGLU || out.epilogue == GEGLU_TANH ? VW : NR);
    out.vector = (int32_t)(2 * panel);
    if (out.epilogue != ARGMAX) out.y += column;
    if (out.bias) out.bias += panel * NR;
    if (out.residual) out.residual += column;
    out.width = (int)(n - panel * NR < NR ? n - panel * NR : NR);
    return out;
}

INLINE Output below(Output out, int64_t rows) {
    out.y += rows * out.y_stride;
    if (out.residual) out.residual += rows * out.y_stride;
    return out;
}

INLINE Output whole_output(const LinearArguments &a) {
    return {a.y, a.bias, a.residual, a.y_stride, NR, a.epilogue, 0};
}

INLINE vf sigmoid(vf x) {
    const vf capped = larger(select(x > splat(80.0f), splat(80.0f), x), splat(-80.0f));
    return splat(1.0f) / (splat(1.0f) + vexp(-capped));
}

INLINE vf gate(vf g, vf up, int epilogue) {
    if (epilogue == SWIGLU) return g * sigmoid(g) * up;
    // tanh(z) = 2·sigmoid(2z) − 1
    const vf z = splat(0.7978845608f) * (g + splat(0.044715f) * g * g * g);
    return splat(0.5f) * g * (splat(2.0f) * sigmoid(z + z)) * up;
}

INLINE void keep_argmax(const Output &t, vf a, vf b, int64_t row) {
    if (t.bias) a += load(t.bias), b += load(t.bias + VW);
    if (t.width < NR) {
        a = select((vi)(lanes() < t.width - vi{}), a, splat(-INFINITY));
        b = select((vi)(lanes() + VW < t.width - vi{}), b, splat(-INFINITY));
    }
    ((Argmax *)t.y)[row].see(a, b, t.vector);
}

template <int EPILOGUE>
INLINE void finish_row(const Output &t, vf a, vf b, int64_t row) {
    if (EPILOGUE == ARGMAX) return keep_argmax(t, a, b, row);
    float *y = t.y + row * t.y_stride;
    if (EPILOGUE == SWIGLU || EPILOGUE == GEGLU_TANH) {
        if (t.bias) a += load(t.bias), b += load(t.bias + VW);
        store(y, gate(a, b, EPILOGUE));
        return;
    }
    if (t.width == NR) {
        if (t.bias) a += load(t.bias), b += load(t.bias + VW);
        if (EPILOGUE == ADD) {
            const float *residual = t.residual + row * t.y_stride;
            a += load(residual), b += load(residual + VW);
        }
        store(y, a);
        store(y + VW, b);
        return;
    }
    float whole[NR];
    store(whole, a);
    store(whole + VW, b);
    for (int j = 0; j < t.width; ++j) {
        float value = whole[j] + (t.bias ? t.bias[j] : 0.0f);
        y[j] = EPILOGUE == ADD ? value + t.residual[row * t.y_stride + j] : value;
    }
}

template <int EPILOGUE>
INLINE void finish_all(const Output *out, int64_t count, const float *sums, int64_t stride,
                       int64_t rows) {
    for (int64_t q = 0; q < count; ++q) {
        const Output one = out[q];
        for (int64_t r = 0; r < rows; ++r)
            finish_row<EPILOGUE>(one, load(sums + r * stride + q * NR),
                                 load(sums + r * stride + q * NR + VW), r);
    }
}

// What becomes of the sums [rows, stride] of `count` panels; a function of its own, since tiles are
// many.
static __attribute__((noinline, unused)) void finish_rows(const Output *out, int64_t count,
                                                          const float *sums, int64_t stride,
                                                          int64_t rows) {
    switch (out->epilogue) {
        case PLAIN: return finish_all<PLAIN>(out, count, sums, stride, rows);
        case ADD: return finish_all<ADD>(out, count, sums, stride, rows);
        case SWIGLU: return finish_all<SWIGLU>(out, count, sums, stride, rows);
        case GEGLU_TANH: return finish_all<GEGLU_TANH>(out, count, sums, stride, rows);
        default: return finish_all<ARGMAX>(out, count, sums, stride, rows);
    }
}
