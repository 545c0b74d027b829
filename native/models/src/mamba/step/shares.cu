// What the scans of a step share: LANES threads have a channel, and each has a share of its states.

template <class T> __device__ __forceinline__ T total(T sum) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

template <class T, int N> struct alignas(N * sizeof(T)) Several { T of[N]; };

// The largest power of two that divides `n` elements into packs of at most 16 bytes in the type of the arithmetic.
__device__ constexpr int at_once(int n) {
    int together = 1;
    while (n % (2 * together) == 0 && 2 * together * sizeof(REAL) <= 16) together *= 2;
    return together;
}

// Where number k of a lane's N is in a row. Lanes have adjacent packs if the host guarantees alignment.
template <int N> __device__ __forceinline__ i64 place(int k) {
    constexpr int TOGETHER = ALIGNED ? at_once(N) : 1;
    return (k / TOGETHER * LANES + threadIdx.x % LANES) * TOGETHER + k % TOGETHER;
}

// A thread's share of a row of `count` numbers, padded with zeros.
template <int N, class T> __device__ __forceinline__ void own(const T* row, i64 count, REAL (&to)[N]) {
#if ALIGNED
    constexpr int TOGETHER = at_once(N);
#pragma unroll
    for (int k = 0; k < N; k += TOGETHER) {
        auto several = *(const Several<T, TOGETHER>*)(row + place<N>(k));
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e) to[k + e] = widen(several.of[e]);
    }
#else
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = place<N>(k) < count ? widen(row[place<N>(k)]) : (REAL)0;
#endif
}

// Writes a thread's share back.
template <int N> __device__ __forceinline__ void give(const REAL (&from)[N], REAL* row, i64 count) {
#if ALIGNED
    constexpr int TOGETHER = at_once(N);
#pragma unroll
    for (int k = 0; k < N; k += TOGETHER) {
        Several<REAL, TOGETHER> several;
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e) several.of[e] = from[k + e];
        *(Several<REAL, TOGETHER>*)(row + place<N>(k)) = several;
    }
#else
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (place<N>(k) < count) row[place<N>(k)] = from[k];
#endif
}
