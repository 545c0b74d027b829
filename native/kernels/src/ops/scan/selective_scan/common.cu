// Shared by the scan and its gradient. A thread holds K states of a channel, which has P lanes;
// there are N states.

// Rows of states are loaded and stored 16 bytes at a time where they are aligned to that.
struct __align__(16) Unit { REAL v[16 / sizeof(REAL)]; };
constexpr int UNIT = 16 / sizeof(REAL);

// Whether state k of a lane exists, rather than being padding.
__device__ __forceinline__ bool exists(int lane, int k) { return K * P == N || lane * K + k < N; }

// `row` points to the lane's states; `wide` says that rows start at multiples of 16 bytes.
__device__ __forceinline__ void load_row(REAL (&to)[K], const REAL* row, int lane, bool wide) {
    if (K % UNIT == 0 && K * P == N && wide) {
#pragma unroll
        for (int k = 0; k < K; k += UNIT) {
            Unit unit = *(const Unit*)(row + k);
#pragma unroll
            for (int i = 0; i < UNIT && k + i < K; i++) to[k + i] = unit.v[i];
        }
    } else {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = exists(lane, k) ? row[k] : REAL(0);
    }
}

__device__ __forceinline__ void store_row(REAL* row, const REAL (&from)[K], int lane, bool wide) {
    if (K % UNIT == 0 && K * P == N && wide) {
#pragma unroll
        for (int k = 0; k < K; k += UNIT) {
            Unit unit;
#pragma unroll
            for (int i = 0; i < UNIT && k + i < K; i++) unit.v[i] = from[k + i];
            *(Unit*)(row + k) = unit;
        }
    } else {
#pragma unroll
        for (int k = 0; k < K; k++)
            if (exists(lane, k)) row[k] = from[k];
    }
}

// 2^decay * state + plus. A zero state stays zero, since an infinite 2^decay would turn it into NaN.
__device__ __forceinline__ REAL decayed(REAL decay, REAL state, REAL plus) {
    return state == REAL(0) ? plus : fma(exp2_fast(decay), state, plus);
}
