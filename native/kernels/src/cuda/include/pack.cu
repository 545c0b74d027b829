// A vector of VEC elements, moved by one access: 16 bytes, or one element where the host cannot prove the alignment.
struct alignas(VEC * sizeof(STORAGE)) Pack { STORAGE of[VEC]; };

// Loads the elements from `at` on; those from `count` on are 0. Pass WHOLE where all packs are full. With a branch the
// compiler splits 16-bit values right after the load, and so waits for it.
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
