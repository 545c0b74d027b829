// Blocks of a cluster access each other's shared memory, from compute capability 9 on.

__device__ __forceinline__ int rank_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Maps a shared-memory address of this block to the corresponding one of block `rank` of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Reads the word that corresponds to `own` in the shared memory of block `rank`.
template <class T>
__device__ __forceinline__ T of_block(const T* own, int rank) {
    static_assert(sizeof(T) == 4, "a word");
    T value;
    unsigned word;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(in_block(address(own), rank)) : "memory");
    memcpy(&value, &word, sizeof(word));
    return value;
}

// Reads four adjacent words that correspond to `own` in the shared memory of block `rank`.
__device__ __forceinline__ int4 of_block(const int4* own, int rank) {
    int4 all;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w) : "r"(in_block(address(own), rank)) : "memory");
    return all;
}

__device__ __forceinline__ float4 of_block(const float4* own, int rank) {
    int4 all = of_block((const int4*)own, rank);
    return {__int_as_float(all.x), __int_as_float(all.y), __int_as_float(all.z), __int_as_float(all.w)};
}

// Cluster barrier in two halves: arrive (this block's earlier accesses are done), then wait (those of all blocks are).
__device__ __forceinline__ void done_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void meet_in_cluster() {
    done_in_cluster();
    wait_for_cluster();
}
