// One step of the causal convolution of each of many sequences, with SiLU behind it. A thread has a channel; its samples
// move on by one.

struct Params {
    const STORAGE* u;          // (batch, channels), rows apart by stride
    const REAL* w;             // (channels, WIDTH)
    const REAL* b;             // (channels), or none
    STORAGE* const* samples;   // the sequences' last samples, each (layers, WIDTH - 1, channels)
    STORAGE* y;                // (batch, channels)
    i64 layer, channels, stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) step_conv(Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    i64 channel = (i64)blockIdx.x * THREADS + threadIdx.x, sequence = blockIdx.y;
    if (channel >= p.channels) return;
    STORAGE* samples = p.samples[sequence] + p.layer * (WIDTH - 1) * p.channels + channel;
    STORAGE held[WIDTH];
    REAL sum = p.b ? p.b[channel] : (REAL)0;
#pragma unroll
    for (int step = 0; step + 1 < WIDTH; ++step) held[step] = samples[step * p.channels];
    held[WIDTH - 1] = p.u[sequence * p.stride + channel];
#pragma unroll
    for (int step = 0; step < WIDTH; ++step) sum = fma(p.w[channel * WIDTH + step], widen(held[step]), sum);
#pragma unroll
    for (int step = 0; step + 1 < WIDTH; ++step) samples[step * p.channels] = held[step + 1];
    narrow(silu(sum), p.y[sequence * p.channels + channel]);
}
