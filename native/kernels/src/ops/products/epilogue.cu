// The epilogue of all products with compressed weights: a bias, the activation FN and one rounding.

__device__ __forceinline__ STORAGE finished(REAL sum) {
    STORAGE y;
    narrow(activate<FN>(sum), y);
    return y;
}

// Applies the epilogue to a sum; there is no bias if `b` is null.
__device__ __forceinline__ STORAGE finished(float sum, const float* b, i64 output) {
    return finished(b ? sum + b[output] : sum);
}
