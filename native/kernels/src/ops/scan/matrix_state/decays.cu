// The decays of a chunk's steps where each key has its own. A product of two steps takes the decay between them. Where a
// boundary lies between these, that is the decay from the earlier step to the boundary, times that from there to the later
// one: neither is above 1 where no decay is, so that none overflows, however strong decays are. Steps of the same NEAR, with
// no boundary between them, take decays one by one.

constexpr int TILE = 16, NEAR = TILE / 2;

// Those of COUNT keys.
template <int COUNT>
struct Decays {
    float step[CHUNK][COUNT + 4]; // of a step
    float log[CHUNK][COUNT + 4];  // log2 of that from the start of the chunk through a step

    // Loads those of a head's keys from `first` on; the whole block calls it. A thread has a key in some tiles.
    __device__ __forceinline__ void load(const Params& p, const Chunk& at, int first) {
        constexpr int EACH = CHUNK / TILE * COUNT / THREADS;
        int key = threadIdx.x % COUNT, tile = threadIdx.x / COUNT;
        float logs[EACH][TILE];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int begin = (tile + i * (THREADS / COUNT)) * TILE;
            const float* from = p.g + (at.of_head(p) + (i64)begin * p.heads) * p.keys + first + key;
            float sum = 0;
#pragma unroll
            for (int row = 0; row < TILE; row++) {
                bool there = begin + row < at.left() && first + key < p.keys;
                float own = there ? log_decay(from[(i64)row * p.heads * p.keys]) : 0.0f;
                step[begin + row][key] = exp2_fast(own);
                logs[i][row] = sum += own;
            }
            log[begin + TILE - 1][key] = sum;
        }
        __syncthreads();
        float before[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            before[i] = 0;
            for (int other = 0; other < tile + i * (THREADS / COUNT); other++) before[i] += log[other * TILE + TILE - 1][key];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int row = 0; row < TILE; row++)
                log[(tile + i * (THREADS / COUNT)) * TILE + row][key] = before[i] + logs[i][row];
        __syncthreads();
    }

    // The decay from the end of a step, or from the start of the chunk if it is -1, to that of another.
    __device__ __forceinline__ float between(int from, int to, int key) const {
        return exp2_fast(log[to][key] - (from < 0 ? 0.0f : log[from][key]));
    }
};
