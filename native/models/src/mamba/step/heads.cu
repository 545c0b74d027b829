// One step of Mamba-2's convolution, of its state space dual and of its gate, for several sequences. A block has CHANNELS
// channels of a head; LANES threads share a channel, and each has STATES states. The heads of a group share B and C: each
// block convolves those that it reads, and the first block of a group also writes their conv_state.
//
// As in scan.cu, all loads are issued before their first use, and those of memory that no earlier kernel of the step
// writes, before the wait.

constexpr int CHANNELS = THREADS / LANES;

struct alignas(16) Four { REAL of[4]; };

// The channel of the convolution with this number among those that a block needs: B and C of its group, and its channels
// of the head from `first` on. Those past the head's end are -1.
__device__ __forceinline__ int channel_of(const Scan& p, int number, int group, int first) {
    int own = first + number - 2 * p.count;
    if (number < p.count) return p.inner + group * p.count + number;
    if (number < 2 * p.count) return p.inner + (p.groups + group - 1) * p.count + number;
    return own < p.width && number < 2 * p.count + CHANNELS ? blockIdx.y * p.width + own : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, LEAST) step_heads(Scan p) {
    extern __shared__ Four shared[];
    REAL* mixed = (REAL*)shared; // B, C and the channels of the head, after the convolution
    int first = blockIdx.x * CHANNELS, head = blockIdx.y, group = head / p.heads_of_group;
    i64 sequence = blockIdx.z;
    bool leads = head % p.heads_of_group == 0 && first == 0;
    int convolved = p.inner + 2 * p.groups * p.count;
    i64 conv_state = p.layer * (WIDTH - 1) * convolved;
    Taps held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        int of = channel_of(p, threadIdx.x + k * THREADS, group, first);
        if (of >= 0)
            held[k] = taps(p.samples[sequence] + conv_state + of, convolved, p.conv_w + of * WIDTH,
                           p.conv_b ? p.conv_b + of : 0);
    }
    int channel = first + threadIdx.x / LANES;
    bool there = channel < p.width;
    // Threads past the head's last channel keep running, because the shuffles of `total` need whole warps.
    int of = head * p.width + (there ? channel : p.width - 1);
    i64 state = (p.layer * p.inner + of) * p.count;
    REAL h[STATES], a = p.a[head], d = p.d[head], dt_b = p.dt_b[head];
    own(p.states[sequence] + state, p.count, h);
    let_others_begin();
    wait_for_others();
    const BETWEEN* projected = p.projected + sequence * (p.inner + convolved + (int)gridDim.y);
    REAL z = widen(projected[of]), dt = step_size(widen(projected[p.inner + convolved + head]), dt_b, p.lo, p.hi);
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        int number = threadIdx.x + k * THREADS;
        int of = channel_of(p, number, group, first);
        if (of < 0) continue;
        STORAGE newest;
        narrow(widen(projected[p.inner + of]), newest);
        mixed[number] = convolve(held[k], newest);
        if (leads || of < p.inner) keep(held[k], p.next_samples[sequence] + conv_state + of, convolved, newest);
    }
    __syncthreads();
    REAL b[STATES], c[STATES], x = mixed[2 * p.count + threadIdx.x / LANES], y = 0;
    own(mixed, p.count, b);
    own(mixed + p.count, p.count, c);
    REAL decay = exp2_fast(dt * a * (REAL)LOG2_E);
#pragma unroll
    for (int k = 0; k < STATES; ++k) {
        h[k] = decay * h[k] + dt * x * b[k];
        y = fma(c[k], h[k], y);
    }
    y = total(y);
    if (!there) return;
    give(h, p.next_states[sequence] + state, p.count);
    if (threadIdx.x % LANES == 0) p.y[sequence * p.inner + of] = fma(d, x, y) * silu(z);
}
