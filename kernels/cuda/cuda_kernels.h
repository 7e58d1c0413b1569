// The CUDA kernels of a step, as the host calls them. Needs no CUDA headers: a stream is a cudaStream_t. Every function puts work on
// its stream and returns; none waits, allocates or reads back, so all can be captured in a CUDA graph (after one step without a
// graph: a kernel's first launch loads it). A launch that fails throws std::runtime_error with CUDA's own words; wrong arguments throw
// std::invalid_argument before anything is launched.
//
// A step, in this order on one stream (records, tables and workspace in device memory, see step.h and segments.h):
//
//   begin_step                           once
//   add_statistics                       per shard of averaged gradients; where a norm, skip_nonfinite or a loss scale asks for it
//   combine_statistics                   where several ranks have parts of the gradients
//   decide_adam or decide_sgd            once: factor, skip, loss scale, step counts, plans
//   adam or sgd                          per shard, one launch each
//
// The arithmetic is the CPU step's (update_rule.h, float16.h, loss_scale.h), and so are the update's bits.
#pragma once

#include "../kernels.h"
#include "tables.h"

namespace zero::kernels::cuda {

using Stream = void*;
struct ConvertArgs;  // bind.h

/// Statistics of a new step: nothing seen yet.
void begin_step(StepRecord* record, Stream stream);

/// Adds the squares of a shard's gradients, and its first non-finite parameter, to the record. Parameters without a gradient in
/// this step are left out. The same bits for the same shard on every GPU.
void add_statistics(Span grad, const SegmentTable& segments, const ParameterStep* parameters, StatisticsWorkspace* workspace,
                    StepRecord* record, Stream stream);

/// The record's statistics become those of all ranks, from what each has found.
void combine_statistics(const Statistics* of_ranks, int ranks, StepRecord* record, Stream stream);

/// Decides the step and fills the plans (either may be null) of all parameters, unless the step is skipped.
void decide_adam(const AdamDecision& tables, AdamPlan<float>* plans, AdamPlan<double>* plans_double, Stream stream);
void decide_sgd(const SgdDecision& tables, SgdPlan<float>* plans, SgdPlan<double>* plans_double, Stream stream);

/// One fused pass over a shard, in place; spans as kernels::adam() takes them, from the shard's element 0 on. A span without memory for
/// max_exp_avg_sq, master or momentum_buffer is none. A parameter whose group has no amsgrad (no momentum) leaves that state alone.
/// @param blocks   at most so many; 0: as many as the GPU holds at once
void adam(const AdamSpans& spans, const AdamTables& tables, Stream stream, int blocks = 0);
void sgd(const SgdSpans& spans, const SgdTables& tables, Stream stream, int blocks = 0);

/// out = in × factor, or out += in × factor, of n elements, between any two float types.
void convert(Span out, Span in, std::int64_t n, const ConvertArgs& args, Stream stream, int blocks = 0);
/// x *= factor.
void scale(Span x, std::int64_t n, double factor, Stream stream);
void zero(Span x, std::int64_t n, Stream stream);

}  // namespace zero::kernels::cuda
