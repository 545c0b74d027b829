// Quantizes floats to ternary numbers and to bytes: sums of magnitudes, thresholds, planes, bytes. The
// host gives THREADS and WIDE, the threads of a block for a row, the numbers of stages, LEAST_SCALE and TWN.

template <class T, class F>
__device__ __forceinline__ T reduced(T value, T* shared, F join) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) shared[threadIdx.x] = join(shared[threadIdx.x], shared[threadIdx.x + step]);
        __syncthreads();
    }
    T all = shared[0];
    __syncthreads();
    return all;
}

// Sums the magnitudes of a row: all of them, as for ABSMEAN, or those above the threshold. NaN counts in both. One
// block per row.
extern "C" __global__ void ternary_sizes(Rules p) {
    __shared__ double shared[THREADS];
    auto add = [](double a, double b) { return a + b; };
    i64 row = blockIdx.x;
    float above = p.stage == ABSMEAN ? -1.0f : p.thresholds[p.parts == 1 ? 0 : row];
    double sum = 0.0, count = 0.0;
    for (i64 i = threadIdx.x; i < p.n; i += THREADS) {
        float size = fabsf(widen(p.x[row * p.n + i]));
        if (!(size <= above)) {
            sum += size;
            count += 1.0;
        }
    }
    sum = reduced(sum, shared, add);
    count = reduced(count, shared, add);
    if (threadIdx.x == 0) {
        p.sums[2 * row] = sum;
        p.sums[2 * row + 1] = count;
    }
}

// Thresholds and scales of a stage; a GIVEN threshold is `floor`. One block per part: a row, or the whole tensor.
extern "C" __global__ void ternary_threshold(Rules p) {
    __shared__ double shared[THREADS];
    auto add = [](double a, double b) { return a + b; };
    i64 part = blockIdx.x, per = p.parts == 1 ? p.rows : 1;
    double sum = 0.0, count = 0.0;
    if (p.stage != GIVEN) {
        for (i64 row = threadIdx.x; row < per; row += THREADS) {
            sum += p.sums[2 * (part * per + row)];
            count += p.sums[2 * (part * per + row) + 1];
        }
    }
    sum = reduced(sum, shared, add);
    count = reduced(count, shared, add);
    if (threadIdx.x != 0) return;
    double mean = count == 0.0 ? 0.0 : sum / count;
    if (p.stage == ABSMEAN) {
        float scale = (float)(mean < LEAST_SCALE ? LEAST_SCALE : mean);
        p.scales[part] = scale;
        p.thresholds[part] = scale / 2.0f;
    } else if (p.stage == TWNTHRESHOLD) {
        p.thresholds[part] = __fmul_rn(TWN, (float)mean);
    } else if (p.stage == TWNSCALE) {
        p.scales[part] = (float)mean;
    } else {
        p.scales[part] = 1.0f;
        p.thresholds[part] = p.floor;
    }
}

// The planes by thresholds, or by 0 if there are none. One thread per byte.
extern "C" __global__ void ternary_cut(Rules p) {
    i64 bytes = (p.n + 7) / 8, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.rows * bytes) return;
    i64 row = at / bytes, begin = at % bytes * 8;
    float threshold = p.thresholds ? p.thresholds[p.parts == 1 ? 0 : row] : 0.0f;
    int plane0 = 0, plane1 = 0;
    Eight values = eight(p.x + row * p.n, begin, p.n);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        bool there = begin + j < p.n;
        plane0 |= (there && values[j] > threshold) << j;
        plane1 |= (there && values[j] < -threshold) << j;
    }
    p.planes[0][at] = plane0;
    p.planes[1][at] = plane1;
}

// The bytes of a row and its scale; zeros and NaN for a row that is not finite. One block per row.
extern "C" __global__ void ternary_bytes(Rules p) {
    __shared__ unsigned sizes[THREADS];
    i64 row = blockIdx.x;
    const STORAGE* x = p.x + row * p.n;
    unsigned most = 0;
    for (i64 i = threadIdx.x; i < p.n; i += THREADS) {
        unsigned size = size_of(widen(x[i]));
        most = larger(most, size);
        if (size >= 0x7f800000 && p.bad) atomicMin(p.bad, (unsigned long long)(row * p.n + i));
    }
    most = reduced(most, sizes, larger);
    Measure measure(most, p.floor);
    for (i64 i = threadIdx.x; i < p.n; i += THREADS) p.q[row * p.n + i] = measure.byte_of(widen(x[i]));
    if (threadIdx.x == 0) p.scales[row] = measure.scale;
}

// The position of a byte in product order. Products read 32 cells as 8 words: word b has cells b, 8 + b, 16 + b and 24
// + b. Without tiles these words are contiguous. With tiles they are in the order of the threads of tile.cu: thread 4
// (row % 8) + t of a warp has 4 words of cells of every 512 columns, from the 4 t-th on. It reads 16 bytes of each, and
// then 16 more.
__device__ __forceinline__ i64 place(const Rules& p, i64 row, i64 i) {
    i64 word = i / 32;
    int b = i % 8, j = i % 32 / 8;
    if (p.tiles == 0) return row * p.stride + word * 32 + b * 4 + j;
    i64 line = (word / 16 * p.tiles + row / 8) * 8 + word % 4 * 2 + b / 4;
    return line * 512 + (row % 8 * 4 + word % 16 / 4) * 16 + b % 4 * 4 + j;
}

// Transposes bytes among four lanes: lane j gets byte j of each.
__device__ __forceinline__ unsigned turned(unsigned bytes) {
    unsigned other = __shfl_xor_sync(0xffffffff, bytes, 1);
    bytes = __byte_perm(bytes, other, threadIdx.x & 1 ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xffffffff, bytes, 2);
    return __byte_perm(bytes, other, threadIdx.x & 2 ? 0x3276 : 0x5410);
}

// Quantizes a part of a row for products: writes the bytes in product order, and on request in storage order. Each
// round covers 8 COUNT columns per part, eight per thread, and the parts interleave. A thread keeps its columns of the
// first round in registers. Rows past the last one are zeros, which pad a tile. `join` reduces a thread's largest
// magnitude to that of the row. Returns the sum of the thread's bytes.
template <int COUNT, class F, class G>
__device__ __forceinline__ int make_bits(const Rules& p, i64 row, int part, int parts, F join, G place) {
    i64 n = row < p.rows ? p.n : 0, begin = 8 * (part * COUNT + (i64)threadIdx.x), step = 8 * COUNT * parts;
    const STORAGE* x = p.x + row * p.n;
    signed char* q = p.q ? p.q + row * p.n : nullptr;
    Eight first = eight(x, begin, n);
    unsigned most = largest_of(first);
    for (i64 i = begin + step; i < n; i += step) most = larger(most, largest_of(eight(x, i, n)));
    Measure measure(join(most), p.floor);
    int total = 0;
    // Warps stay whole, because lanes exchange bytes.
    for (i64 i = begin; i - 8 * (threadIdx.x % 32) < p.stride; i += step) {
        if (i != begin) first = eight(x, i, n);
        Bytes bytes = bytes_of(measure, first, q, i, n);
        total += bytes.total();
        unsigned low = turned(bytes.low), high = turned(bytes.high);
        if (i >= p.stride) continue;
        i64 cell = i / 32 * 32 + i / 8 % 4;
        *(unsigned*)(p.bits + place(cell)) = low;
        *(unsigned*)(p.bits + place(cell + 4)) = high;
    }
    if (threadIdx.x == 0 && part == 0 && row < p.rows) p.scales[row] = measure.scale;
    return total;
}

// A block of WIDE threads prepares a row.
extern "C" __global__ void __launch_bounds__(WIDE) ternary_bits(Rules p) {
    // The product may begin to read weights. Earlier kernels may still read the memory that this one writes.
    let_others_begin();
    wait_for_others();
    __shared__ unsigned sizes[WIDE / 32];
    __shared__ int totals[WIDE / 32];
    i64 row = blockIdx.x;
    auto join = [&](unsigned most) { return joined<WIDE / 32>(most, sizes, larger); };
    int total = make_bits<WIDE>(p, row, 0, 1, join, [&](i64 i) { return place(p, row, i); });
    total = joined<WIDE / 32>(total, totals, [](int a, int b) { return a + b; });
    if (threadIdx.x == 0 && row < p.rows) p.totals[row] = total;
}
