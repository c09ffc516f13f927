#include "recurrent.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>

namespace lowtide::sim {

using at::Tensor;
using at::TensorList;

namespace {

struct Weights {
  Tensor of_input, of_hidden, input_bias, hidden_bias, projection;
};

// The weights of one direction of one layer: two matrices, two biases if there are any, a projection if there is one.
Weights weights_at(TensorList all, size_t direction, size_t per_direction, bool has_biases) {
  size_t first = direction * per_direction;
  Weights w;
  w.of_input = all[first];
  w.of_hidden = all[first + 1];
  if (has_biases) {
    w.input_bias = all[first + 2];
    w.hidden_bias = all[first + 3];
  }
  if (per_direction % 2) w.projection = all[first + per_direction - 1];
  return w;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

struct State {
  Tensor hidden, cell;
};

// One time step: what the input contributes is computed beforehand, for all steps at once.
State lstm_step(const Tensor& from_input, const State& before, const Weights& w) {
  Tensor gates = linear(before.hidden, w.of_hidden, w.hidden_bias).add_(from_input);
  auto part = gates.unsafe_chunk(4, 1);
  Tensor in = part[0].sigmoid_(), forget = part[1].sigmoid_(), fresh = part[2].tanh_(), out = part[3].sigmoid_();
  Tensor cell = (forget * before.cell).add_(in * fresh);
  Tensor hidden = out * cell.tanh();
  if (w.projection.defined()) hidden = at::linear(hidden, w.projection);
  return {hidden, cell};
}

State gru_step(const Tensor& from_input, const State& before, const Weights& w) {
  auto of_input = from_input.unsafe_chunk(3, 1);
  auto of_hidden = linear(before.hidden, w.of_hidden, w.hidden_bias).unsafe_chunk(3, 1);
  Tensor reset = of_hidden[0].add_(of_input[0]).sigmoid_(), update = of_hidden[1].add_(of_input[1]).sigmoid_();
  Tensor fresh = of_input[2].add(of_hidden[2].mul_(reset)).tanh_();
  return {(before.hidden - fresh).mul_(update).add_(fresh), {}};
}

State tanh_step(const Tensor& from_input, const State& before, const Weights& w) {
  return {linear(before.hidden, w.of_hidden, w.hidden_bias).add_(from_input).tanh(), {}};
}

State relu_step(const Tensor& from_input, const State& before, const Weights& w) {
  return {at::relu(linear(before.hidden, w.of_hidden, w.hidden_bias).add_(from_input)), {}};
}

using Step = State (*)(const Tensor&, const State&, const Weights&);

struct Sequence {
  Tensor outputs;
  State last;
};

Sequence run_steps(Step step, const Tensor& input, State state, const Weights& w, bool reverse) {
  auto steps = linear(input, w.of_input, w.input_bias).unbind(0);
  std::vector<Tensor> outputs(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    size_t t = reverse ? steps.size() - 1 - i : i;
    state = step(steps[t], state, w);
    outputs[t] = state.hidden;
  }
  return {at::stack(outputs, 0), state};
}

// The CPU computes LSTM layers in float32 with oneDNN; its operator has a derivative, and its kernel is ours as well.
Sequence run_onednn_lstm(const Tensor& input, const State& state, const Weights& w, bool reverse, bool has_biases,
                         int64_t layers, bool bidirectional, bool batch_first, bool train) {
  constexpr int64_t kLstm = 2;  // oneDNN's number of the kind
  Tensor input_bias = has_biases ? w.input_bias : at::zeros(w.of_input.sizes(), w.of_input.options());
  Tensor hidden_bias = has_biases ? w.hidden_bias : at::zeros(w.of_hidden.sizes(), w.of_hidden.options());
  auto [outputs, hidden, cell, workspace] = at::mkldnn_rnn_layer(
      input, w.of_input, w.of_hidden, input_bias, hidden_bias, state.hidden, state.cell, reverse, {}, kLstm,
      state.hidden.size(-1), layers, has_biases, bidirectional, batch_first, train);
  return {outputs, {hidden, cell}};
}

struct Layers {
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional, batch_first;
};

Three run_layers(Step step, bool onednn, const Tensor& given, const Tensor& hidden, const Tensor& cell, TensorList weights,
                 const Layers& how) {
  Tensor input = how.batch_first ? given.transpose(0, 1) : given;
  if (onednn) input = input.contiguous();
  size_t directions = how.bidirectional ? 2 : 1, count = static_cast<size_t>(how.layers) * directions;
  size_t per_direction = weights.size() / count;
  std::vector<Tensor> last_hidden, last_cell;
  for (int64_t layer = 0; layer < how.layers; ++layer) {
    std::vector<Tensor> outputs;
    for (size_t d = 0; d < directions; ++d) {
      size_t index = static_cast<size_t>(layer) * directions + d;
      Weights w = weights_at(weights, index, per_direction, how.has_biases);
      State state{hidden[static_cast<int64_t>(index)], cell.defined() ? cell[static_cast<int64_t>(index)] : Tensor()};
      Sequence ran = onednn ? run_onednn_lstm(input, state, w, d > 0, how.has_biases, how.layers, how.bidirectional,
                                              how.batch_first, how.train)
                            : run_steps(step, input, state, w, d > 0);
      outputs.push_back(ran.outputs);
      last_hidden.push_back(ran.last.hidden);
      if (cell.defined()) last_cell.push_back(ran.last.cell);
    }
    input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (how.dropout != 0 && how.train && layer < how.layers - 1) input = at::dropout(input, how.dropout, true);
  }
  Tensor output = how.batch_first ? input.transpose(0, 1) : input;
  return {output, at::stack(last_hidden, 0), cell.defined() ? at::stack(last_cell, 0) : Tensor()};
}

Two first_two(Three all) {
  return {std::get<0>(all), std::get<1>(all)};
}

}  // namespace

Three lstm(const Tensor& input, TensorList state, TensorList weights, bool has_biases, int64_t layers, double dropout,
           bool train, bool bidirectional, bool batch_first) {
  TORCH_CHECK(state.size() == 2, "lstm expects two hidden states");
  size_t per_direction = weights.size() / static_cast<size_t>(layers * (bidirectional ? 2 : 1));
  bool projected = per_direction % 2 != 0;
  bool onednn = at::globalContext().userEnabledMkldnn() && input.scalar_type() == at::kFloat && !projected &&
                input.numel() != 0;
  Tensor hidden = onednn ? state[0].contiguous() : state[0], cell = onednn ? state[1].contiguous() : state[1];
  Layers how{has_biases, layers, dropout, train, bidirectional, batch_first};
  return run_layers(&lstm_step, onednn, input, hidden, cell, weights, how);
}

Two gru(const Tensor& input, const Tensor& state, TensorList weights, bool has_biases, int64_t layers, double dropout,
        bool train, bool bidirectional, bool batch_first) {
  Layers how{has_biases, layers, dropout, train, bidirectional, batch_first};
  return first_two(run_layers(&gru_step, false, input, state, Tensor(), weights, how));
}

Two rnn_tanh(const Tensor& input, const Tensor& state, TensorList weights, bool has_biases, int64_t layers,
             double dropout, bool train, bool bidirectional, bool batch_first) {
  Layers how{has_biases, layers, dropout, train, bidirectional, batch_first};
  return first_two(run_layers(&tanh_step, false, input, state, Tensor(), weights, how));
}

Two rnn_relu(const Tensor& input, const Tensor& state, TensorList weights, bool has_biases, int64_t layers,
             double dropout, bool train, bool bidirectional, bool batch_first) {
  Layers how{has_biases, layers, dropout, train, bidirectional, batch_first};
  return first_two(run_layers(&relu_step, false, input, state, Tensor(), weights, how));
}

Three lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell,
                const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor gates = from_input + from_hidden;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto part = gates.chunk(4, 1);
  Tensor next = part[1].sigmoid() * cell + part[0].sigmoid() * part[2].tanh();
  return {part[3].sigmoid() * next.tanh(), next, at::empty({0}, gates.options())};
}

Two gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hidden,
             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor of_input = from_input, of_hidden = from_hidden;
  if (input_bias && input_bias->defined()) {
    of_input = of_input + *input_bias;
    of_hidden = of_hidden + *hidden_bias;
  }
  auto in = of_input.chunk(3, 1), state = of_hidden.chunk(3, 1);
  Tensor reset = (in[0] + state[0]).sigmoid(), update = (in[1] + state[1]).sigmoid();
  Tensor fresh = (in[2] + state[2] * reset).tanh();
  return {(hidden - fresh) * update + fresh, at::empty({0}, of_input.options())};
}

}  // namespace lowtide::sim
