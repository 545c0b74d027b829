// A sequence: its first step and its first chunk among those of all, its length, and its place among states. Steps of
// all sequences are fewer than 2^31, so that they need few registers.
struct Sequence {
    int first, length, chunk, place;

    __device__ __forceinline__ int chunks() const { return (length + CHUNK - 1) / CHUNK; }
};

// Sequence `at` of those of a packed call.
__device__ __forceinline__ Sequence packed_sequence(const int* sequences, i64 at) {
    int4 of = ((const int4*)sequences)[at];
    return {of.x, of.y, of.z, of.w};
}
