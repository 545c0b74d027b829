// The sequences of a call, for kernels over chunks of CHUNK steps: see sequences.rs.
//   PACKED   whether they are those of p.sequences, else of a batch, each of p.length steps in p.chunks chunks

__device__ __forceinline__ Sequence sequence(const Params& p, int at) {
    if (!PACKED) return {at * (int)p.length, (int)p.length, at * (int)p.chunks, at};
    return packed_sequence(p.sequences, at);
}

// The sequence of a chunk.
__device__ __forceinline__ Sequence sequence_of(const Params& p, int chunk) {
    return sequence(p, PACKED ? p.of_chunks[chunk] : chunk / (int)p.chunks);
}
