// 16 bytes of elements, which are moved at once where they lie at such an address: VEC of them, which
// the host sets to 1 where they may not.
struct alignas(VEC * sizeof(STORAGE)) Pack { STORAGE of[VEC]; };

// The elements from `at` on; those from `count` on are 0.
__device__ __forceinline__ Pack load(const STORAGE* from, i64 at, i64 count) {
    if (at + VEC <= count) return *(const Pack*)(from + at);
    Pack pack = {};
    for (int e = 0; e < VEC; ++e)
        if (at + e < count) pack.of[e] = from[at + e];
    return pack;
}

__device__ __forceinline__ void store(const Pack& pack, STORAGE* to, i64 at, i64 count) {
    if (at + VEC <= count) {
        *(Pack*)(to + at) = pack;
        return;
    }
    for (int e = 0; e < VEC; ++e)
        if (at + e < count) to[at + e] = pack.of[e];
}
