// The sequences of a call, for kernels over chunks of CHUNK steps: see sequences.rs.
//   PACKED   whether they are those of p.sequences, else of a batch, each of p.length steps in p.chunks chunks

// A sequence: its first step and its first chunk among those of all, its length, and its place among states. Steps of
// all sequences are fewer than 2^31, so that they need few registers.
struct Sequence {
    int first, length, chunk, place;

    __device__ __forceinline__ int chunks() const { return (length + CHUNK - 1) / CHUNK; }
};

__device__ __forceinline__ Sequence sequence(const Params& p, int at) {
    if (!PACKED) return {at * (int)p.length, (int)p.length, at * (int)p.chunks, at};
    int4 of = ((const int4*)p.sequences)[at];
    return {of.x, of.y, of.z, of.w};
}

// The sequence of a chunk.
__device__ __forceinline__ Sequence sequence_of(const Params& p, int chunk) {
    return sequence(p, PACKED ? p.of_chunks[chunk] : chunk / (int)p.chunks);
}
