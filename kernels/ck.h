// The C ABI of the reshard kernels: what `ckpt_tool/device/` calls by ctypes and anyone else may link.
//
// Every function returns a cudaError_t as int (0: done) unless its comment says otherwise; ck_error_name and ck_error_text
// say what it means. Nothing here knows torch: addresses are device addresses, streams are cudaStream_t (null: default).
// The host shim (portable.h) gives the same functions over plain memory, for tests.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define CK_ABI_VERSION 1u
#define CK_LEVELS 3 // strided dims above the contiguous run; the planner unrolls what lies above them

#if defined(__GNUC__)
#define CK_API extern "C" __attribute__((visibility("default")))
#else
#define CK_API extern "C"
#endif

// One box: `rows` rows of `run`, row (i0, i1, i2) at src + i0*sstr[0] + i1*sstr[1] + i2*sstr[2], and so for dst.
//
// run: bytes for box_copy, digest and compare, elements for box_cast, box_dequantise and box_quantise; see each .cu for what it adds.
// tile0: the number of this box's first tile: the sum of the tiles of the boxes before it in the list.
// Either a row is cut into `tiles_per_row` tiles (then rows_per_tile is 1), or a tile has `rows_per_tile` whole rows.
// div1, div2: ck_magic(ext[1]), ck_magic(ext[2]); divr: ck_magic of what the kernel divides by within a tile.
// vlog: log2 of the widest access, in bytes, that both addresses, the run and all strides allow (0..4); in compare 4 or 0, the
// run aside.
struct ck_desc {
    uint64_t src, dst;
    int64_t sstr[CK_LEVELS], dstr[CK_LEVELS];
    uint64_t run;
    uint64_t tile0;
    uint64_t div1, div2, divr;
    uint32_t ext[CK_LEVELS]; // 1 where there is no such level
    uint32_t rows;           // ext[0] * ext[1] * ext[2], below 2^32
    uint32_t rows_per_tile, tiles_per_row;
    uint32_t aux; // number of a record beside the list (a scale, a result)
    uint8_t vlog, op;
    uint16_t flags;
};

// The element types of box_cast and box_dequantise. I8 and F4 are codes only; F4 is E2M1, two a byte.
enum ck_kind { CK_F64, CK_F32, CK_BF16, CK_F16, CK_E4M3, CK_E5M2, CK_E8M0, CK_E4M3FNUZ, CK_E5M2FNUZ, CK_I8, CK_F4,
               CK_BOOL, CK_U8, CK_I16, CK_U16, CK_I32, CK_U32, CK_I64, CK_U64, CK_BYTES };  // compare alone has these

// The scales of one box of codes: element (row, column) of matrix i takes the scale at
//     address + i * matrix_stride + (row0 + row) / height * row_stride + (column0 + column) / width * bytes of a scale
// where row and column are those of the box, and height and width are those of the blocks that share a scale.
struct ck_scales {
    uint64_t address;
    int64_t matrix_stride, row_stride;  // bytes
    uint64_t div_height, div_width;     // ck_magic of them
    uint32_t row0, column0, width;      // row0 + row and column0 + column stay below 2^32
    uint32_t kind, unused[2];           // ck_kind of a scale: F32, BF16 or E8M0, on its own grid
};

// The schemes of box_quantise, as `weight_schemes/written_schemes.py` lists them.
enum ck_scheme { CK_FP8_BLOCK, CK_FP8_CHANNEL, CK_INT8, CK_INT4_G128, CK_MXFP8, CK_MXFP4, CK_NVFP4 };

// Where the scales of one box of floats go: that of block (row, column) of matrix i to
//     scales + i * matrix_stride + row * row_stride + column * bytes of a scale
struct ck_quantised {
    uint64_t scales;                   // on the grid of a scale, as the strides are
    int64_t matrix_stride, row_stride; // bytes
    uint64_t div_down;                 // ck_magic of `down`
    uint32_t down;                     // blocks of a matrix below each other
    uint32_t kind;                     // ck_kind of a scale where the scheme leaves it open: F32, BF16 or F16
    float whole;                       // NVFP4: what the scales of the tensor are multiplied by
    uint32_t unused;
};

struct ck_device_info {
    char name[128];
    char uuid[40];
    uint64_t total_bytes, free_bytes;
    int32_t major, minor, multiprocessors, l2_bytes;
    int32_t driver, runtime; // 13000 is CUDA 13.0; driver: the newest CUDA that the driver can run
    int32_t warp, host;      // host: 1 for the shim, which is no device
};

// -- the runtime ------------------------------------------------------------------------------------------------------
CK_API uint32_t ck_abi(void); // sizeof(ck_desc) << 8 | CK_ABI_VERSION: not an error code
CK_API const char* ck_error_name(int error);
CK_API const char* ck_error_text(int error);
CK_API int ck_devices(int* count);
CK_API int ck_info(int device, ck_device_info* out);
CK_API int ck_use(int device);
CK_API int ck_alloc(void** out, size_t bytes); // 0 bytes: null
CK_API int ck_free(void* p);
CK_API int ck_host_alloc(void** out, size_t bytes); // pinned
CK_API int ck_host_free(void* p);
CK_API int ck_upload(void* to, const void* from, size_t bytes, void* stream);
CK_API int ck_download(void* to, const void* from, size_t bytes, void* stream);
CK_API int ck_move(void* to, const void* from, size_t bytes, void* stream); // device to device
CK_API int ck_fill(void* to, int byte, size_t bytes, void* stream);
CK_API int ck_stream_create(void** out);
CK_API int ck_stream_destroy(void* stream);
CK_API int ck_stream_sync(void* stream);
CK_API int ck_event_create(void** out);
CK_API int ck_event_destroy(void* event);
CK_API int ck_event_record(void* event, void* stream);
CK_API int ck_event_elapsed(float* milliseconds, void* begin, void* end); // waits for end

// -- the kernels ------------------------------------------------------------------------------------------------------
// list: `count` descriptors on the device, sorted by tile0; tiles: their sum. Zero tiles launch nothing. blocks 0: as many
// as fill the device. threads 0: the kernel's own choice.
CK_API int ck_box_copy(const ck_desc* list, uint32_t count, uint64_t tiles, int blocks, int threads, void* stream);
CK_API int ck_box_transpose(const ck_desc* list, uint32_t count, uint64_t tiles, int blocks, int threads, void* stream);
// A cast of every box from one ck_kind to another. counts: 2 for each number in `aux`, added to: finite values that became
// infinite or NaN, and 0.
CK_API int ck_box_cast(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t source, uint32_t target, uint64_t* counts,
                       int blocks, int threads, void* stream);
// Codes times scales as F32, BF16 or F16. scales: a record for each number in `aux`. counts: as above, then elements whose
// scale is NaN. For F4 src and sstr count half bytes.
CK_API int ck_box_dequantise(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t codes, uint32_t target,
                             const ck_scales* scales, uint64_t* counts, int blocks, int threads, void* stream);
// Floats (F32, BF16 or F16) as codes and scales. scheme: ck_scheme. table: a record for each number in `aux`. counts: one for each,
// added to: blocks with what is no finite number.
CK_API int ck_box_quantise(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t source, uint32_t scheme,
                           const ck_quantised* table, uint64_t* counts, int blocks, int threads, void* stream);
// lanes: threads a leaf, 4, 8, 16, 32, or 0 for the kernel's own choice. dst: 16 bytes a leaf, on 16 bytes. tiles: leaves.
CK_API int ck_digest(const ck_desc* list, uint32_t count, uint64_t tiles, int lanes, int blocks, int threads, void* stream);
// What compare found in one box; begun with `first` ~0 and zeros, and added to. gap: the bits of a double.
struct ck_difference {
    uint64_t elements, first, ulp, gap, finite, nans, bad_left, bad_right;
};
// records: one for each number in `aux`. op: ck_kind. See compare.cu.
CK_API int ck_compare(const ck_desc* list, uint32_t count, uint64_t tiles, ck_difference* records, int blocks, int threads,
                      void* stream);
// Constants of a step, each computed in fp64 and rounded once; see adamw_ema.cu.
struct ck_adamw {
    float scale, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, decay, rate, average, average_rest;
};
// Flat buffers of `count` fp32 elements; gradient_kind, parameter_kind: CK_F32 or CK_BF16. ema, parameter: 0 where there is none.
CK_API int ck_adamw_ema(const ck_adamw* constants, uint64_t count, uint64_t gradient, uint32_t gradient_kind, uint64_t master,
                        uint64_t exp_avg, uint64_t exp_avg_sq, uint64_t ema, uint64_t parameter, uint32_t parameter_kind,
                        int blocks, int threads, void* stream);
CK_API int ck_ema_swap(uint64_t count, uint64_t master, uint64_t ema, uint64_t parameter, uint32_t parameter_kind, int blocks,
                       int threads, void* stream);
