// The row of a packed sequence's first tile among those of all sequences. Rounding down may take one row from a sequence,
// so that each has one more.
__device__ __forceinline__ i64 packed_row(i64 first_step, i64 place) { return first_step / TILE + place; }
