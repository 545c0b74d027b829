// 16 bytes of elements, which are moved at once where they lie at such an address: VEC of them, which
// the host sets to 1 where they may not.
struct alignas(VEC * sizeof(STORAGE)) Pack { STORAGE of[VEC]; };

// The elements from `at` on; those from `count` on are 0. Who knows that there are WHOLE packs should say so:
// where the compiler must choose, it takes 16-bit numbers apart as soon as they come, and so waits for them.
template <bool WHOLE>
__device__ __forceinline__ Pack load(const STORAGE* from, i64 at, i64 count) {
    if (WHOLE || at + VEC <= count) return *(const Pack*)(from + at);
    Pack pack = {};
    for (int e = 0; e < VEC; ++e)
        if (at + e < count) pack.of[e] = from[at + e];
    return pack;
}

template <bool WHOLE>
__device__ __forceinline__ void store(const Pack& pack, STORAGE* to, i64 at, i64 count) {
    if (WHOLE || at + VEC <= count)
        *(Pack*)(to + at) = pack;
    else
        for (int e = 0; e < VEC; ++e)
            if (at + e < count) to[at + e] = pack.of[e];
}

__device__ __forceinline__ void widen(const Pack& pack, REAL (&to)[VEC]) {
#pragma unroll
    for (int e = 0; e + 1 < VEC; e += 2) widen(pack.of + e, to[e], to[e + 1]);
    if (VEC == 1) to[0] = widen(pack.of[0]);
}

__device__ __forceinline__ Pack narrow(const REAL (&from)[VEC]) {
    Pack pack;
#pragma unroll
    for (int e = 0; e + 1 < VEC; e += 2) narrow(from[e], from[e + 1], pack.of + e);
    if (VEC == 1) narrow(from[0], pack.of[0]);
    return pack;
}
