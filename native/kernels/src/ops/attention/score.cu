// The score of a key, after common.cu.
//   HAS_MASK, HAS_BIAS   the call's optional inputs

// The score of a key from its product with the query; `hidden()` if the key is masked.
__device__ __forceinline__ REAL score(const Params& p, const Place& at, int i, int j, REAL product) {
    if (i >= p.queries || j >= visible(p, i)) return hidden();
#if HAS_MASK
    if (!p.mask[at.batch * p.mask_at[0] + at.head * p.mask_at[1] + i * p.mask_at[2] + j * p.mask_at[3]]) return hidden();
#endif
    REAL s = p.scale * product;
#if HAS_BIAS
    s += p.bias[at.batch * p.bias_at[0] + at.head * p.bias_at[1] + i * p.bias_at[2] + j * p.bias_at[3]];
#endif
    return s;
}
