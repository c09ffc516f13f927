// Recurrent layers, composed as the CPU composes them. PyTorch would route the device to fused cells that have no CPU kernel.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

namespace lowtide::sim {

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three lstm(const at::Tensor& input, at::TensorList state, at::TensorList weights, bool has_biases, int64_t layers,
           double dropout, bool train, bool bidirectional, bool batch_first);
Two gru(const at::Tensor& input, const at::Tensor& state, at::TensorList weights, bool has_biases, int64_t layers,
        double dropout, bool train, bool bidirectional, bool batch_first);
Two rnn_tanh(const at::Tensor& input, const at::Tensor& state, at::TensorList weights, bool has_biases, int64_t layers,
             double dropout, bool train, bool bidirectional, bool batch_first);
Two rnn_relu(const at::Tensor& input, const at::Tensor& state, at::TensorList weights, bool has_biases, int64_t layers,
             double dropout, bool train, bool bidirectional, bool batch_first);

// The fused cells: nn.LSTMCell, nn.GRUCell and packed sequences still end here.
Three lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cell,
                const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias);
Two gru_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& hidden,
             const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias);

}  // namespace lowtide::sim
