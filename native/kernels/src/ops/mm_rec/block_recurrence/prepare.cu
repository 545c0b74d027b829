// Inputs of the walks, computed for all times at once.

// Converts elements to another type.
extern "C" __global__ void recurrence_convert(Prepare p) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < p.count) narrow(widen(p.from[at]), p.to[at]);
}

// Writes for each time the state before it.
extern "C" __global__ void recurrence_before(Prepare p) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.count) return;
    i64 column = at % p.width, t = at / p.width % p.length, batch = at / p.width / p.length;
    REAL before = t > 0 ? widen(p.from[at - p.width]) : p.initial_state ? p.initial_state[batch * p.width + column] : (REAL)0;
    narrow(before, p.to[at]);
}
