// The window of row j: the rows of a level with `from` rows whose average is row j of a level with `to` rows. With both
// numbers swapped, the rows of the level above whose windows contain row j.
struct Window {
    i64 begin, end;
    __device__ Window(i64 j, i64 from, i64 to) : begin(j * from / to), end(((j + 1) * from + to - 1) / to) {}
    __device__ i64 count() const { return end - begin; }
};
