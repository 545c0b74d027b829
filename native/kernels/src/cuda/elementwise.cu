// What is done element by element between the ops of a larger one. The host chooses MAP:
//   0 -exp(v)   1 the product of two   2 the sum of `terms`   3 a tensor of REAL plus the same
//   `columns` values in each row

struct Params {
    const STORAGE* inputs[4];
    STORAGE* to;
    i64 count, columns;
    i64 terms;
};

extern "C" __global__ void elementwise(Params p) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
#if MAP == 0
    REAL value = -exp(widen(p.inputs[0][i]));
#elif MAP == 1
    REAL value = widen(p.inputs[0][i]) * widen(p.inputs[1][i]);
#elif MAP == 2
    REAL value = 0;
    for (int term = 0; term < 4; ++term)
        if (term < p.terms) value += widen(p.inputs[term][i]);
#else
    REAL value = ((const REAL*)p.inputs[0])[i] + widen(p.inputs[1][i % p.columns]);
#endif
    narrow(value, p.to[i]);
}
