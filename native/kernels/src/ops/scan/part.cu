// The chunks of a block: a segment of a head of a sequence. `id` counts the segments of all heads.
struct Part {
    Sequence of;
    i64 id;
    int head, segment, segments, first, last;

    __device__ __forceinline__ Part(const Params& p, i64 id) : id(id), head(id % p.heads) {
        int index = id / p.heads;
        int2 place = PACKED ? ((const int2*)p.of_segments)[index] : int2{index / p.segments, index % p.segments};
        of = sequence(p, place.x);
        segment = place.y, first = segment * p.each;
        int chunks = of.chunks();
        segments = chunks > p.each ? (chunks + p.each - 1) / p.each : 1;
        last = first + p.each < chunks ? first + p.each : chunks;
    }

    // The offset of a head's state.
    __device__ __forceinline__ i64 state(const Params& p) const { return ((i64)of.place * p.heads + head) * p.size; }
    // The first step of a chunk among those of all sequences, and its steps up to the end of the sequence.
    __device__ __forceinline__ i64 step(int chunk) const { return of.first + chunk * CHUNK; }
    __device__ __forceinline__ int left(int chunk) const { return of.length - chunk * CHUNK; }
    // The index of a chunk of the head.
    __device__ __forceinline__ i64 chunk(const Params& p, int chunk) const {
        return (i64)(of.chunk + chunk) * p.heads + head;
    }
};
