/* SPDX-License-Identifier: Apache-2.0
 *
 * QuantFuse: quantized and fused kernels for LLM inference. The C interface, which is the stable one.
 *
 *   - Tensors are borrowed views, laid out as DLPack's DLTensor: a DLTensor* may be passed as a qf_tensor*.
 *   - Every operation is one call: qf_OP(args, call). `args` says what to compute. `call` says how: the
 *     stream, the caller's workspace, a kernel by name. A null `call` means the defaults.
 *   - The library never allocates device memory, never synchronises and never prints. Scratch memory is the
 *     caller's: qf_OP_workspace gives the bytes for the same args.
 *   - A call returns QF_OK or an error, and on an error before the launch nothing has been written.
 *     qf_last_error() has the message of this thread's last failed call.
 *   - Structs begin zeroed (`qf_linear_args a = {0};`): zero and NULL always mean "the default" or "absent".
 *   - m = 0 and n = 0 are no-ops; k = 0 is an empty sum.
 *   - Outputs never overlap inputs, except where an argument says so.
 */
#ifndef QUANTFUSE_QUANTFUSE_H_
#define QUANTFUSE_QUANTFUSE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define QF_API __attribute__((visibility("default")))
#else
#define QF_API
#endif

/* Enums are ints to C++ too, so that an unknown value from C is an error message and not undefined
 * behaviour. */
#ifdef __cplusplus
#define QF_ENUM_TYPE : int32_t
#else
#define QF_ENUM_TYPE
#endif

#define QF_VERSION_MAJOR 0
#define QF_VERSION_MINOR 1
#define QF_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tensors ------------------------------------------------------------------------------------------- */

typedef struct qf_device {
  int32_t type; /* QF_CPU or QF_CUDA (DLPack's numbers) */
  int32_t id;
} qf_device;

enum { QF_CPU = 1, QF_CUDA = 2 };

typedef struct qf_dtype {
  uint8_t code; /* DLPack's type code: 0 int, 1 uint, 2 float, 4 bfloat, 10 e4m3fn, 12 e5m2, 14 e8m0fnu */
  uint8_t bits;
  uint16_t lanes;
} qf_dtype;

/* Memory layout of DLPack's DLTensor. `strides` counts elements; NULL means compact row-major. */
typedef struct qf_tensor {
  void* data;
  qf_device device;
  int32_t ndim;
  qf_dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} qf_tensor;

/* ---- Formats ------------------------------------------------------------------------------------------- */

/* How one number is coded. 4-bit codes are two per byte along the last dimension, the low nibble first, so a
 * row of c numbers takes ceil(c / 2) bytes; the high nibble behind an odd row is zero. Codes of the FP8
 * formats may be given with their own DLPack type or as uint8; INT8 codes are int8; 4-bit codes are uint8. */
typedef enum qf_format QF_ENUM_TYPE {
  QF_FORMAT_NONE = 0,
  QF_INT8 = 1,     /* -128..127 */
  QF_INT4 = 2,     /* -8..7, two's complement nibbles */
  QF_FP8_E4M3 = 3, /* the "fn" variant: no infinity, largest 448 */
  QF_FP8_E5M2 = 4, /* largest finite 57344 */
  QF_FP4_E2M1 = 5, /* 0 .5 1 1.5 2 3 4 6 and their negatives */
  /* 4-bit codes of a table of 16 numbers, for weights and dequantize; quantize makes NF4 alone. The scales
   * of given codes are any finite numbers. */
  QF_NF4 = 6, /* bitsandbytes' and QLoRA's: quantiles of the normal distribution in -1..1 */
  QF_FP4_BNB =
      7,         /* bitsandbytes' FP4, which is not E2M1: 0 1/192 2/3 1 1/3 1/2 1/6 1/4 and their negatives */
  QF_IQ4_NL = 8, /* GGUF's IQ4_NL and IQ4_XS: integers in -127..113 */
  /* Numbers as they are, for weights of qf_linear that are not quantized: codes of that type and nothing
   * else, neither scale nor zero, offset, g_idx or block. On CUDA cuBLASLt multiplies them where it is
   * there; its handle takes some device memory at the first such call. */
  QF_F32 = 9,
  QF_F16 = 10,
  QF_BF16 = 11
} qf_format;

/* The rectangle of numbers that shares one scale, 0 meaning the whole dimension. For a matrix [rows, cols]:
 *   {0, 0} per tensor    {1, 0} per token or output channel (a row)    {0, 1} per column
 *   {1, g} per group of g within a row, the last one short if g does not divide cols    {128, 128} 2-D blocks
 * The scale tensor has shape [ceil(rows / block.rows), ceil(cols / block.cols)]; a dimension of 1 may be left
 * out. Scales are float32, or E8M0 (powers of two; type e8m0fnu or uint8): E8M0 with {1, 32} is MXFP8 or
 * MXFP4. */
typedef struct qf_block {
  int64_t rows;
  int64_t cols;
} qf_block;

typedef enum qf_activation QF_ENUM_TYPE {
  QF_IDENTITY = 0,
  QF_RELU = 1,
  QF_GELU = 2,      /* x * Phi(x), by the error function */
  QF_GELU_TANH = 3, /* the tanh approximation */
  QF_SILU = 4       /* x * sigmoid(x) */
} qf_activation;

/* ---- Calls and errors ---------------------------------------------------------------------------------- */

typedef enum qf_status QF_ENUM_TYPE {
  QF_OK = 0,
  QF_BAD_ARGUMENT = 1, /* names the tensor, the dimension, what was given and what was expected */
  QF_UNSUPPORTED = 2,  /* no kernel accepts the problem; the message has every kernel's reason */
  QF_DEVICE_ERROR = 3  /* the device refused; the message has the kernel's name */
} qf_status;

typedef struct qf_call {
  void* stream;             /* cudaStream_t, for tensors on a CUDA device */
  void* workspace;          /* on the tensors' device, 64-byte aligned */
  uint64_t workspace_bytes; /* at least what qf_OP_workspace says */
  const char* kernel;       /* run this kernel and no other; NULL: the first in the list that accepts */
  int32_t strict;           /* 1: refuse to fall back to the reference kernel */
} qf_call;

QF_API const char* qf_version(void);
/* The message of the calling thread's last failed call; "" if none failed. Valid until its next call. */
QF_API const char* qf_last_error(void);

/* How many threads the CPU kernels may use, for the whole process. 0 goes back to QUANTFUSE_NUM_THREADS or,
 * where that is unset, to the number of CPUs this process may run on. Inside a caller's own parallel region,
 * and while another thread's call holds the pool, a call runs on the calling thread alone. */
QF_API qf_status qf_set_num_threads(int32_t num_threads);
/* 0 where QUANTFUSE_NUM_THREADS is no number from 1 to 1024; every call on the CPU is refused then. */
QF_API int32_t qf_get_num_threads(void);

/* Text results: at most `capacity` bytes are written, always zero-terminated where capacity > 0; the return
 * value is the length of the whole text without the zero, so that a call with capacity 0 asks for the
 * size. */
QF_API size_t qf_info(char* json, size_t capacity); /* version, ISA, threads, devices, compiled
                                                          architectures */
QF_API size_t qf_kernels(char* json,
                         size_t capacity); /* [{"op", "kernel", "target", "available", "reason"}] */

/* ---- Quantize ------------------------------------------------------------------------------------------ */

typedef enum qf_scale_mode QF_ENUM_TYPE {
  QF_SCALE_DYNAMIC = 0, /* scale = max|x| / qmax of each block, written to `scale` */
  QF_SCALE_STATIC = 1,  /* `scale` (and `zero`) are inputs */
  QF_SCALE_MSE = 2      /* as dynamic, with the range shrunk to what minimises the block's squared error */
} qf_scale_mode;

/* q[r,c] = saturate(round_to_nearest_even(x[r,c] * (1 / scale)) + zero), all in float32.
 * qmax: INT8 127, INT4 7, E4M3 448, E5M2 57344, E2M1 6, NF4 1. Symmetric unless `zero` is given: the range is
 * [min(x,0), max(x,0)] over all codes. An E8M0 scale is 2^(floor(log2(max|x|)) - emax), as OCP microscaling
 * has it. NaN becomes code 0, in FP8 NaN (0x7f); infinities saturate; a dynamic float32 scale is
 * never below 2^-126. */
typedef struct qf_quantize_args {
  const qf_tensor* x; /* in  [rows, cols] f32|f16|bf16, rows contiguous */
  qf_format format;
  qf_block block;
  qf_scale_mode scale_mode;
  const qf_tensor* q;        /* out [rows, cols], or [rows, ceil(cols/2)] for 4-bit codes */
  const qf_tensor* scale;    /* out, or in where static; f32 or e8m0. Where it is an output it may be a
                                transposed view: [row blocks, column blocks] with strides (1, s) */
  const qf_tensor* zero;     /* out, or in where static; i8, shape of scale; NULL: symmetric. Integer formats
                                only */
  const qf_tensor* row_sums; /* out [rows, ceil(cols/block.cols)] i32: sum of codes of each row in a block;
                                optional,
                                integer formats only */
  int64_t hadamard;          /* x H / sqrt(h) of every h neighbouring columns is quantized in place of x, H
                                the Hadamard matrix of h rows (in float32, by the fast transform from
                                neighbours to distant pairs): outliers are spread over h columns. A weight
                                that is rotated likewise gives the same product. A power of two that divides
                                cols; 0: no rotation */
} qf_quantize_args;

QF_API qf_status qf_quantize(const qf_quantize_args* args, const qf_call* call);
QF_API qf_status qf_quantize_workspace(const qf_quantize_args* args, const qf_call* call, uint64_t* bytes);
QF_API size_t qf_quantize_explain(const qf_quantize_args* args, const qf_call* call, char* json,
                                  size_t capacity);

/* x[r,c] = (q[r,c] - zero) * scale + offset, in float32, rounded after every step */
typedef struct qf_dequantize_args {
  const qf_tensor* q; /* in  [rows, cols], or [rows, ceil(cols/2)] for 4-bit codes */
  qf_format format;
  qf_block block;
  const qf_tensor* scale;  /* in  f32 or e8m0 */
  const qf_tensor* zero;   /* in  i8 or f32, shape of scale; optional */
  const qf_tensor* g_idx;  /* in  [cols] i32: the scale's column of each column, in place of c / block.cols;
                             optional */
  const qf_tensor* x;      /* out [rows, cols] f32|f16|bf16, rows contiguous */
  const qf_tensor* offset; /* in  f32, shape of scale; optional, integer formats */
} qf_dequantize_args;

QF_API qf_status qf_dequantize(const qf_dequantize_args* args, const qf_call* call);
QF_API qf_status qf_dequantize_workspace(const qf_dequantize_args* args, const qf_call* call,
                                         uint64_t* bytes);
QF_API size_t qf_dequantize_explain(const qf_dequantize_args* args, const qf_call* call, char* json,
                                    size_t capacity);

/* How AutoAWQ and the tools of GPTQ hold a weight in words of 32 bits, the lowest bits first. */
typedef enum qf_word_layout QF_ENUM_TYPE {
  QF_WORDS_AWQ = 1,    /* qweight [k, n/8], qzeros [groups, n/8]: of every 8 columns 0 2 4 6 1 3 5 7 */
  QF_WORDS_GPTQ = 2,   /* qweight [ceil(k*bits/32), n], qzeros [groups, ceil(n*bits/32)], zero points less
                          one */
  QF_WORDS_GPTQ_V2 = 3 /* the same with zero points as they are */
} qf_word_layout;

/* x[k,n] = (q[k,n] - zero[g,n]) * scale[g,n], g = k / group or g_idx[k]; in float32, then rounded to the type
 * of x. The weight [n, k] of a layer is x transposed. */
typedef struct qf_dequantize_words_args {
  qf_word_layout layout;
  int32_t bits;             /* AWQ: 4; GPTQ: 2, 3, 4 or 8; 0: 4 */
  int64_t group;            /* rows of x that share a scale; 0: all */
  const qf_tensor* qweight; /* in  i32, by layout; rows contiguous */
  const qf_tensor* qzeros;  /* in  i32, by layout; rows contiguous */
  const qf_tensor* scales;  /* in  [groups, n] f32|f16|bf16, rows contiguous */
  const qf_tensor* g_idx;   /* in  [k] i32: the group of each row (GPTQ's act-order); optional */
  const qf_tensor* x;       /* out [k, n] f32|f16|bf16, rows contiguous */
} qf_dequantize_words_args;

QF_API qf_status qf_dequantize_words(const qf_dequantize_words_args* args, const qf_call* call);
QF_API qf_status qf_dequantize_words_workspace(const qf_dequantize_words_args* args, const qf_call* call,
                                               uint64_t* bytes);
QF_API size_t qf_dequantize_words_explain(const qf_dequantize_words_args* args, const qf_call* call,
                                          char* json, size_t capacity);

/* ---- Products ------------------------------------------------------------------------------------------ */

typedef enum qf_order QF_ENUM_TYPE {
  QF_NK = 0, /* b holds its n columns as rows: [n, k], or [n, ceil(k/2)] for 4-bit codes */
  QF_KN = 1  /* b is [k, n], or [k, ceil(n/2)] for 4-bit codes */
} qf_order;

/* c[m,n] = sum over k of (a[m,k] - a_zero) * a_scale * (b[k,n] - b_zero) * b_scale, plus bias[n].
 * With c of type int32 there are no scales and no bias, and the integers are exact (modulo 2^32). */
typedef struct qf_scaled_mm_args {
  const qf_tensor* a; /* in  [m, k], or [m, ceil(k/2)] for INT4; rows contiguous */
  const qf_tensor* b; /* in  as b_order says; rows contiguous */
  const qf_tensor* c; /* out [m, n] i32|f32|f16|bf16, rows contiguous */
  qf_format a_format; /* INT8, INT4, E4M3 or E5M2; a and b both integer or both FP8 */
  qf_format b_format;
  qf_order b_order;
  int32_t is_b_constant; /* 1: no work that is still under way on the stream writes b or b_scale: kernels may
                               read them before it has ended */
  int64_t k;             /* needed for INT4, where the shape has only ceil(k/2); 0: from a */
  const qf_tensor* a_scale; /* in  f32, shape by a_block over [m, k]; NULL: 1 */
  const qf_tensor* b_scale; /* in  f32, shape by b_block over [n, k]; NULL: 1 */
  qf_block a_block;
  qf_block b_block;
  const qf_tensor* a_zero;   /* in  i32, [m] or [1]; optional, integer formats */
  const qf_tensor* b_zero;   /* in  i32, [n] or [1]; optional, integer formats */
  const qf_tensor* bias;     /* in  [n] f32|f16|bf16; optional */
  int32_t fast_accumulation; /* 1: FP8 sums may stay in the tensor cores for all of k. Hopper's keep about 14
                                bits of a sum, of which the kernels promote parts to f32 otherwise */
} qf_scaled_mm_args;

QF_API qf_status qf_scaled_mm(const qf_scaled_mm_args* args, const qf_call* call);
QF_API qf_status qf_scaled_mm_workspace(const qf_scaled_mm_args* args, const qf_call* call, uint64_t* bytes);
QF_API size_t qf_scaled_mm_explain(const qf_scaled_mm_args* args, const qf_call* call, char* json,
                                   size_t capacity);

/* ---- Linear layers ------------------------------------------------------------------------------------- */

/* A weight matrix w[n,k] = (codes - zero) * scale + offset; or w = codes, in the formats that are numbers.
 * Canonical: codes, scale, zero, offset, g_idx: what checkpoints hold. Packed: the bytes that the fast
 * kernels of one backend read, made once by qf_weight_pack; the canonical tensors may be freed then (keep
 * format, n, k, block, is_gated). */
typedef struct qf_weight {
  qf_format format;
  int64_t n;
  int64_t k;
  qf_block block;         /* over [n, k] */
  const qf_tensor* codes; /* [n, k], or [n, ceil(k/2)] for 4-bit codes; rows contiguous */
  const qf_tensor* scale; /* f32 or e8m0, shape by block; with g_idx [ceil(n/block.rows), groups]; none
                              where the codes are numbers */
  const qf_tensor* zero;  /* i8 (integer zero points) or f32 (floating ones), shape of scale; optional */
  const qf_tensor* g_idx; /* [k] i32: the group of each k (act-order); optional */
  int32_t is_gated;       /* 1: rows [0, n/2) are the gate and [n/2, n) the up projection: y = act(gate) *
                              up */
  int32_t is_constant; /* 1: no work that is still under way on the stream writes codes or scale: kernels may
                              read them before it has ended. A weight with a packed form counts as such. */
  const qf_tensor* packed; /* u8 [bytes], 64-byte aligned, from qf_weight_pack; optional */
  const qf_tensor* offset; /* f32, shape of scale: what GGUF calls a minimum; optional, integer formats */
} qf_weight;

/* Bytes of the packed form for `device`, and the packing itself (into weight->packed, on the codes'
 * device). QF_UNSUPPORTED where only kernels of the canonical form take the weight. On a CUDA device packing
 * waits until it is done: the kernels may read a packed weight before the work ahead of them on the stream
 * has ended, so that whoever writes one by other means must wait for that too. On the CPU under Linux the
 * system is asked to hold weight->packed in huge pages (madvise), from which it is read faster. */
QF_API qf_status qf_weight_packed_bytes(const qf_weight* weight, qf_device device, uint64_t* bytes);
QF_API qf_status qf_weight_pack(const qf_weight* weight, const qf_call* call);

/* y = quantize( act(x w^T + bias) [* up] + residual ). n_out = n, or n / 2 where the weight is gated.
 * With x_gain x is normalized first: x * x_gain / sqrt(mean(x^2) + x_eps), as qf_rms_norm does; for one or
 * two tokens of bf16 on sm_90 in the same kernel. */
typedef struct qf_linear_args {
  const qf_tensor* x;       /* in  [m, k] f32|f16|bf16; or codes of act_format, with x_scale; rows
                                contiguous */
  const qf_tensor* x_scale; /* in  [m, ceil(k/act_group)] f32, where x holds codes */
  qf_format act_format;     /* NONE: arithmetic on x as it is. INT8, E4M3, E5M2: x is quantized on the way
                                in, for a weight that is quantized too */
  int64_t act_group;        /* columns of x that share a scale; 0: the whole row (per token) */
  qf_weight weight;
  const qf_tensor* bias; /* in  [n] f32|f16|bf16; optional */
  qf_activation activation;
  const qf_tensor* residual;  /* in  [m, n_out] f32|f16|bf16, rows contiguous; may be y itself; optional */
  const qf_tensor* y;         /* out [m, n_out] f32|f16|bf16, or codes of out_format; rows contiguous */
  qf_format out_format;       /* NONE; or INT8, E4M3, E5M2: y is quantized on the way out */
  qf_scale_mode out_mode;     /* static: out_scale is an input; dynamic: an output */
  int64_t out_group;          /* columns of y that share a scale where dynamic; 0: the whole row */
  const qf_tensor* out_scale; /* static: in, f32 [1]; dynamic: out, f32 [m, ceil(n_out/out_group)] */
  int32_t batch_invariant;    /* 1: the bits of a row of y do not depend on m: no kernel runs whose
                                 order of summation does */
  const qf_tensor* x_gain;    /* in  [k] f32|f16|bf16: x is normalized; not where x is quantized; optional */
  double x_eps;               /* not negative */
  int32_t fast_accumulation;  /* as in qf_scaled_mm_args, where x and the weight are FP8 codes */
} qf_linear_args;

QF_API qf_status qf_linear(const qf_linear_args* args, const qf_call* call);
QF_API qf_status qf_linear_workspace(const qf_linear_args* args, const qf_call* call, uint64_t* bytes);
QF_API size_t qf_linear_explain(const qf_linear_args* args, const qf_call* call, char* json, size_t capacity);

/* dx[m,k] = sum over n of dy[m,n] * w[n,k]: the gradient with respect to the input. Needs the canonical
 * weight. */
typedef struct qf_linear_backward_args {
  const qf_tensor* dy; /* in  [m, n] f32|f16|bf16, rows contiguous */
  qf_weight weight;
  const qf_tensor* dx; /* out [m, k] f32|f16|bf16, rows contiguous */
} qf_linear_backward_args;

QF_API qf_status qf_linear_backward(const qf_linear_backward_args* args, const qf_call* call);
QF_API qf_status qf_linear_backward_workspace(const qf_linear_backward_args* args, const qf_call* call,
                                              uint64_t* bytes);
QF_API size_t qf_linear_backward_explain(const qf_linear_backward_args* args, const qf_call* call, char* json,
                                         size_t capacity);

/* ---- Producers of quantized activations ---------------------------------------------------------------- */

/* h = x + residual (written back to residual);  y = quantize( h * gain / sqrt(mean(h^2) + eps) ).
 * h is rounded to its type before it is normalised, so that the result is that of an addition followed by a
 * norm. */
typedef struct qf_rms_norm_args {
  const qf_tensor* x;        /* in  [m, n] f32|f16|bf16, rows contiguous */
  const qf_tensor* residual; /* in and out [m, n], type of x, rows contiguous; optional */
  const qf_tensor* gain;     /* in  [n] f32|f16|bf16; optional (1) */
  double eps;
  const qf_tensor* y;         /* out [m, n] f32|f16|bf16, or codes of out_format; rows contiguous */
  qf_format out_format;       /* NONE, INT8, E4M3, E5M2 */
  qf_scale_mode out_mode;     /* static or dynamic */
  int64_t out_group;          /* columns that share a scale where dynamic; 0: the whole row */
  const qf_tensor* out_scale; /* static: in, f32 [1]; dynamic: out, f32 [m, ceil(n/out_group)], or the
                                 transpose of such a tensor as in qf_quantize */
  int64_t hadamard;           /* columns that are rotated before they are quantized, as in qf_quantize */
} qf_rms_norm_args;

QF_API qf_status qf_rms_norm(const qf_rms_norm_args* args, const qf_call* call);
QF_API qf_status qf_rms_norm_workspace(const qf_rms_norm_args* args, const qf_call* call, uint64_t* bytes);
QF_API size_t qf_rms_norm_explain(const qf_rms_norm_args* args, const qf_call* call, char* json,
                                  size_t capacity);

/* y = quantize( act(x[:, :n]) * x[:, n:] ), or with is_ungated quantize( act(x) ) */
typedef struct qf_gated_act_args {
  const qf_tensor* x; /* in  [m, 2n] f32|f16|bf16, gate then up; [m, n] if ungated; rows contiguous */
  qf_activation activation;
  const qf_tensor* y;         /* out [m, n] f32|f16|bf16, or codes of out_format; rows contiguous */
  qf_format out_format;       /* NONE, INT8, E4M3, E5M2 */
  qf_scale_mode out_mode;     /* static or dynamic */
  int64_t out_group;          /* columns that share a scale where dynamic; 0: the whole row */
  const qf_tensor* out_scale; /* static: in, f32 [1]; dynamic: out, f32 [m, ceil(n/out_group)], or the
                                 transpose of such a tensor as in qf_quantize */
  int32_t is_ungated;         /* 1: nothing is gated: x has n columns, and y = quantize(act(x)) */
  int64_t hadamard;           /* columns that are rotated before they are quantized, as in qf_quantize */
} qf_gated_act_args;

QF_API qf_status qf_gated_act(const qf_gated_act_args* args, const qf_call* call);
QF_API qf_status qf_gated_act_workspace(const qf_gated_act_args* args, const qf_call* call, uint64_t* bytes);
QF_API size_t qf_gated_act_explain(const qf_gated_act_args* args, const qf_call* call, char* json,
                                   size_t capacity);

/* ---- Quantization with calibration data ---------------------------------------------------------------- */

/* In which order GPTQ quantizes the columns of a weight. */
typedef enum qf_act_order QF_ENUM_TYPE {
  QF_ACT_ORDER_NONE = 0,  /* as they come */
  QF_ACT_ORDER_GROUP = 1, /* by falling hessian[i,i], and groups are formed in that order: needs g_idx */
  QF_ACT_ORDER_STATIC = 2 /* by falling hessian[i,i], and groups are those of neighbouring columns, their
                              scales taken from the weight before it is changed */
} qf_act_order;

/* GPTQ: codes whose layer gives the least sum of squared output errors that rounding the columns one after
 * another can give, the columns to come making up for the errors of those before:
 *   minimise  sum over r of  d[r,:] (hessian + damping mean(diagonal) I) d[r,:]^T,   d = w - (q - zero) scale
 * Scales are found as qf_quantize finds them (scale_mode), group by group, from the columns as changed so far
 * (from the weight itself where a group has more than 256 columns). A column with hessian[i,i] = 0, which
 * calibration has not seen, is rounded to nearest. A NaN or infinity in `weight` or `hessian` and a hessian
 * that is not positive definite with its damping are QF_BAD_ARGUMENT. CPU only. */
typedef struct qf_gptq_quantize_args {
  const qf_tensor* weight;  /* in  [n, k] f32|f16|bf16, rows contiguous */
  const qf_tensor* hessian; /* in  [k, k] f32: sum over inputs of x^T x, times any factor; symmetric */
  qf_format format;         /* INT4 or INT8 */
  int32_t bits;             /* 2 to 4 in INT4 codes, 2 to 8 in INT8 codes; 0: all of the format's */
  int64_t group;            /* columns that share a scale; 0: the whole row */
  qf_scale_mode scale_mode; /* dynamic or MSE */
  qf_act_order act_order;
  double damping;         /* share of the mean of hessian's diagonal that is added to it; 0: 0.01 */
  const qf_tensor* q;     /* out [n, k], or [n, ceil(k/2)] for INT4 */
  const qf_tensor* scale; /* out [n, ceil(k/group)] f32 */
  const qf_tensor* zero;  /* out i8, shape of scale; NULL: symmetric */
  const qf_tensor* g_idx; /* out [k] i32: the group of each column; with QF_ACT_ORDER_GROUP alone */
  const qf_tensor* loss;  /* out [n] f32: what is minimised, of each row; optional */
} qf_gptq_quantize_args;

QF_API qf_status qf_gptq_quantize(const qf_gptq_quantize_args* args, const qf_call* call);
QF_API qf_status qf_gptq_quantize_workspace(const qf_gptq_quantize_args* args, const qf_call* call,
                                            uint64_t* bytes);
QF_API size_t qf_gptq_quantize_explain(const qf_gptq_quantize_args* args, const qf_call* call, char* json,
                                       size_t capacity);

/* AWQ: a factor for each input channel, so that w * channel_scale rounded to nearest, applied to
 * x / channel_scale, gives the least sum of squared output errors on the sampled inputs `x`:
 *   channel_scale[c] = act_scale[c]^alpha, scaled to have sqrt(largest * smallest) = 1,   alpha = i / grid,
 * i = 0 .. grid. Weights that share their input (q, k and v; gate and up) are passed as one, row below row.
 * With `clip`, the range of each group of w * channel_scale is then shrunk to 1.00, 0.95, .. 0.50 of itself,
 * whichever gives the least error of the group's part of the output. The caller limits w * channel_scale to
 * +-clip and quantizes it with qf_quantize. A NaN or infinity is QF_BAD_ARGUMENT. CPU only. */
typedef struct qf_awq_search_args {
  const qf_tensor* weight;    /* in  [n, k] f32|f16|bf16, rows contiguous */
  const qf_tensor* x;         /* in  [t, k] f32|f16|bf16, rows contiguous; 256 to 1024 rows are enough */
  const qf_tensor* act_scale; /* in  [k] f32: mean |x| of each channel over all inputs; NULL: that of x */
  qf_format format;           /* INT4 or INT8 */
  int32_t bits;               /* 2 to 4 in INT4 codes, 2 to 8 in INT8 codes; 0: all of the format's */
  int64_t group;              /* columns that share a scale; 0: the whole row */
  int32_t is_asymmetric;
  int32_t grid;                   /* 0: 20 */
  const qf_tensor* channel_scale; /* out [k] f32 */
  const qf_tensor* clip;          /* out [n, ceil(k/group)] f32: largest magnitude in each group; optional */
  const qf_tensor* loss; /* out [grid + 1] f32: the sum of squared output errors of each alpha, before
                                     clipping; the first is that of rounding the weight as it is; optional */
} qf_awq_search_args;

QF_API qf_status qf_awq_search(const qf_awq_search_args* args, const qf_call* call);
QF_API qf_status qf_awq_search_workspace(const qf_awq_search_args* args, const qf_call* call,
                                         uint64_t* bytes);
QF_API size_t qf_awq_search_explain(const qf_awq_search_args* args, const qf_call* call, char* json,
                                    size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* QUANTFUSE_QUANTFUSE_H_ */
