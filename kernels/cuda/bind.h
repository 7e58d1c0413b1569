// From spans with types known at run time to the body that is compiled for them: checks, alignment, and the choice. The CUDA sources
// and the host tests share it; each calls use(body) once.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "convert_body.h"
#include "statistics_body.h"
#include "update_body.h"

namespace zero::kernels::cuda {

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

/// Calls f with a value of the type that a 16- or 32-bit float type's name stands for.
template <class F>
void with_float_type(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    case DType::f64:
      break;
  }
  throw std::invalid_argument("the CUDA kernels take f64 only where parameters, gradients and state all are");
}
template <class F>
void with_any_type(DType type, F&& f) {
  if (type == DType::f64) return f(double{});
  with_float_type(type, f);
}

/// Calls f(UpdateTypes<…>{}) for parameters of type P.
template <class P, class F>
void with_update_types(Span grad, DType state, bool master, F&& f) {
  if constexpr (std::is_same_v<P, double>) {
    require(grad.dtype == DType::f64 && state == DType::f64,
            "the CUDA update of f64 parameters: gradients and state are f64 too");
    require(!master, "a master is f32, of a 16-bit parameter");
    f(UpdateTypes<double, double, double, double, false>{});
  } else {
    require(state == DType::f32 || state == DType::bf16, "state is f32 or bf16, and f64 exactly where the parameters are");
    with_float_type(grad.dtype, [&](auto g) {
      using G = decltype(g);
      const auto with_state = [&](auto s) {
        using S = decltype(s);
        if constexpr (std::is_same_v<P, float>) {
          require(!master, "a master is f32, of a 16-bit parameter");
          f(UpdateTypes<float, float, G, S, false>{});
        } else if (master) {
          f(UpdateTypes<float, P, G, S, true>{});
        } else {
          f(UpdateTypes<float, P, G, S, false>{});
        }
      };
      state == DType::f32 ? with_state(float{}) : with_state(BFloat16{});
    });
  }
}

template <class T, template <class> class Plan>
const Plan<T>* plans_of(const UpdateTables<Plan>& tables) {
  if constexpr (std::is_same_v<T, double>) {
    return tables.plans_double;
  } else {
    return tables.plans;
  }
}

template <class Body, class Spans, class Tables>
void bind_streams(Body& body, const Spans& spans, const Tables& tables) {
  body.param = static_cast<typename Body::P*>(spans.param.data);
  body.grad = static_cast<const typename Body::G*>(spans.grad.data);
  body.master = static_cast<float*>(spans.master.data);
  body.plans = plans_of<typename Body::T>(tables);
  require(body.plans != nullptr || tables.segments.count == 0, "the update needs plans of the parameters' arithmetic");
  body.skip = tables.skip;
  body.table = tables.segments;
}

/// P: the parameters' type.
template <class P, class Use>
void bind_adam(const AdamSpans& s, const AdamTables& tables, Use&& use) {
  require(s.exp_avg_sq.dtype == s.exp_avg.dtype, "adam: exp_avg and exp_avg_sq differ in type");
  require(s.max_exp_avg_sq.data == nullptr || s.max_exp_avg_sq.dtype == s.exp_avg.dtype,
          "adam: exp_avg and max_exp_avg_sq differ in type");
  require(s.master.data == nullptr || s.master.dtype == DType::f32, "a master is f32, of a 16-bit parameter");
  with_update_types<P>(s.grad, s.exp_avg.dtype, s.master.data != nullptr, [&](auto types) {
    const auto bind = [&](auto body) {
      using Body = decltype(body);
      bind_streams(body, s, tables);
      body.exp_avg = static_cast<typename Body::S*>(s.exp_avg.data);
      body.exp_avg_sq = static_cast<typename Body::S*>(s.exp_avg_sq.data);
      body.max_exp_avg_sq = static_cast<typename Body::S*>(s.max_exp_avg_sq.data);
      body.alignment = align_packs(Body::kPack, {s.param, s.grad, s.exp_avg, s.exp_avg_sq, s.max_exp_avg_sq, s.master});
      use(body);
    };
    using Types = decltype(types);
    s.max_exp_avg_sq.data != nullptr ? bind(AdamBody<Types, true>{}) : bind(AdamBody<Types, false>{});
  });
}

template <class P, class Use>
void bind_sgd(const SgdSpans& s, const SgdTables& tables, Use&& use) {
  require(s.master.data == nullptr || s.master.dtype == DType::f32, "a master is f32, of a 16-bit parameter");
  const bool buffer = s.momentum_buffer.data != nullptr;
  const DType none = std::is_same_v<P, double> ? DType::f64 : DType::f32;  // of the state that isn't there
  with_update_types<P>(s.grad, buffer ? s.momentum_buffer.dtype : none, s.master.data != nullptr, [&](auto types) {
    using Types = decltype(types);
    const auto bind = [&](auto body) {
      using Body = decltype(body);
      bind_streams(body, s, tables);
      body.momentum_buffer = static_cast<typename Body::S*>(s.momentum_buffer.data);
      body.alignment = align_packs(Body::kPack, {s.param, s.grad, s.momentum_buffer, s.master});
      use(body);
    };
    if (buffer) return bind(SgdBody<Types, true>{});
    if constexpr (!std::is_same_v<typename Types::S, BFloat16>) bind(SgdBody<Types, false>{});
  });
}

template <class Use>
void bind_statistics(Span grad, const SegmentTable& segments, const ParameterStep* parameters, Use&& use) {
  with_any_type(grad.dtype, [&](auto e) {
    using E = decltype(e);
    use(StatisticsBody<E>{static_cast<const E*>(grad.data), parameters, segments, align_statistics(grad)});
  });
}

/// What convert() is told besides memory.
struct ConvertArgs {
  double factor = 1;
  const double* device_factor = nullptr;  ///< in device memory, multiplies too
  bool add = false;                       ///< adds to what is in `out`
};

template <class Use>
void bind_convert(Span out, Span in, std::int64_t n, const ConvertArgs& args, Use&& use) {
  require(out.data != in.data || out.dtype == in.dtype, "convert: in place only where the types are the same");
  with_any_type(out.dtype, [&](auto to) {
    with_any_type(in.dtype, [&](auto from) {
      ConvertBody<decltype(to), decltype(from)> body{};
      body.out = static_cast<decltype(to)*>(out.data);
      body.in = static_cast<const decltype(from)*>(in.data);
      body.n = n;
      body.factor = args.factor;
      body.device_factor = args.device_factor;
      body.add = args.add;
      body.alignment = align_packs(body.kPack, {out, in});
      use(body);
    });
  });
}

}  // namespace zero::kernels::cuda
