// Prepares bytes of activations for box.cu, appended to rules.cu. A cluster of at most MOST_PARTS blocks, which the
// host gives, shares each row, so it needs compute capability 9.

// The order in which box.cu reads bytes. In turn k it multiplies words 2 k and 2 k + 1 of each group of four times 32
// cells. They are stored as contiguous matrices of 8 rows by 16 bytes, for `eights` groups of eight rows.
struct Matrices {
    i64 own, turn;

    __device__ __forceinline__ Matrices(const Rules& p, int row) {
        int eights = (int)p.eights, eight = row / 8;
        turn = eights * 256;
        own = eight / eights * (p.stride / 32) * turn + eight % eights * 256 + row % 8 * 16;
    }

    __device__ __forceinline__ i64 operator()(i64 i) const {
        i64 word = i / 32;
        int b = i % 8, j = i % 32 / 8;
        return own + (word / 4 * 4 + b / 2) * turn + b % 2 * 128 + word % 4 * 4 + j;
    }
};

// The maximum over all blocks of a cluster, which send their own values to each other.
struct Largest {
    unsigned of[MOST_PARTS];
    Barrier there;

    // All barriers must be open before a block sends.
    __device__ __forceinline__ void open_for(int parts) {
        if (parts == 1) return;
        if (threadIdx.x == 0) {
            open(&there, 1);
            opened();
            expect(&there, parts * sizeof(unsigned));
        }
        __syncwarp();
        meet_in_cluster();
    }

    __device__ __forceinline__ unsigned among(unsigned own, int part, int parts) {
        if (parts == 1) return own;
        if (threadIdx.x < parts) send(&of[part], own, threadIdx.x, &there);
        wait(&there, 0);
        return __reduce_max_sync(0xffffffff, of[threadIdx.x % 32 % parts]);
    }
};

// A cluster of `parts` blocks quantizes a row, for products that need no sums of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS) ternary_parts(Rules p) {
    __shared__ unsigned sizes[THREADS / 32];
    __shared__ Largest largest;
    let_others_begin();
    int parts = (int)p.parts, part = rank_in_cluster();
    int row = blockIdx.x / parts;
    Matrices place(p, row);
    largest.open_for(parts);
    wait_for_others();
    auto join = [&](unsigned most) { return largest.among(joined<THREADS / 32>(most, sizes, larger), part, parts); };
    make_bits<THREADS>(p, row, part, parts, join, place);
}
