defmodule Sidewinder.OpTable do
  @moduledoc false
  # Written by `bin/op_table` from the declarations of the ops in native/kernels: edit those.

  @doc "All ops: what they take and give, and their options."
  def ops do
    [
      %{
        name: "selective_scan",
        about: "Mamba selective scan over whole sequences",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dt", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "A", shape: "(D, N)", precision: "wide", optional: false},
          %{name: "B", shape: "(B, L, N) | (B, L, G, N) | (D, N)", precision: "storage", optional: false},
          %{name: "C", shape: "(B, L, N) | (B, L, G, N) | (D, N)", precision: "storage", optional: false},
          %{name: "D", shape: "(D)", precision: "wide", optional: true},
          %{name: "z", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dt_bias", shape: "(D)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, D, N)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, D, N)", precision: "wide", when: {:asked, :return_state}},
          %{name: "states", shape: "(B, L, D, N)", precision: "wide", when: {:asked, :return_states}}
        ],
        options: [
          %{name: "dt_softplus", takes: "flag", choices: [], range: :any, default: false, help: "apply softplus to dt + dt_bias"},
          %{name: "dt_clamp", takes: "pair", choices: [], range: :any, default: nil, help: "clamp dt to LO,HI, inclusive; no clamp by default"},
          %{name: "clamp_grad", takes: "text", choices: ["mask", "straight_through"], range: :any, default: "mask", help: "gradient of the clamp"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, D, N)"},
          %{name: "return_states", takes: "flag", choices: [], range: :any, default: false, help: "write states (B, L, D, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state", "dstates"],
        backward_of: nil
      },
      %{
        name: "selective_scan_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dt", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "A", shape: "(D, N)", precision: "wide", optional: false},
          %{name: "B", shape: "(B, L, N) | (B, L, G, N) | (D, N)", precision: "storage", optional: false},
          %{name: "C", shape: "(B, L, N) | (B, L, G, N) | (D, N)", precision: "storage", optional: false},
          %{name: "D", shape: "(D)", precision: "wide", optional: true},
          %{name: "z", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dt_bias", shape: "(D)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, D, N)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, D, N)", precision: "wide", optional: true},
          %{name: "dstates", shape: "(B, L, D, N)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "dt_softplus", takes: "flag", choices: [], range: :any, default: false, help: "apply softplus to dt + dt_bias"},
          %{name: "dt_clamp", takes: "pair", choices: [], range: :any, default: nil, help: "clamp dt to LO,HI, inclusive; no clamp by default"},
          %{name: "clamp_grad", takes: "text", choices: ["mask", "straight_through"], range: :any, default: "mask", help: "gradient of the clamp"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, D, N)"},
          %{name: "return_states", takes: "flag", choices: [], range: :any, default: false, help: "write states (B, L, D, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "selective_scan"
      },
      %{
        name: "selective_state_update",
        about: "Mamba selective scan of one token",
        hint: "Layout is channel-last: (batch, channels)",
        inputs: [
          %{name: "x", shape: "(B, D)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, D, N)", precision: "wide", optional: false},
          %{name: "dt", shape: "(B, D)", precision: "storage", optional: false},
          %{name: "A", shape: "(D, N)", precision: "wide", optional: false},
          %{name: "B", shape: "(B, N) | (B, G, N)", precision: "storage", optional: false},
          %{name: "C", shape: "(B, N) | (B, G, N)", precision: "storage", optional: false},
          %{name: "D", shape: "(D)", precision: "wide", optional: true},
          %{name: "z", shape: "(B, D)", precision: "storage", optional: true},
          %{name: "dt_bias", shape: "(D)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, D, N)", precision: "wide", when: :always}
        ],
        options: [
          %{name: "dt_softplus", takes: "flag", choices: [], range: :any, default: false, help: "apply softplus to dt + dt_bias"},
          %{name: "dt_clamp", takes: "pair", choices: [], range: :any, default: nil, help: "clamp dt to LO,HI, inclusive; no clamp by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "ssd",
        about: "Scan of Mamba-2 (state space dual) over whole sequences",
        hint: "Layout is (batch, length, heads, width) and (batch, length, groups, state)",
        inputs: [
          %{name: "x", shape: "(B, L, H, P)", precision: "storage", optional: false},
          %{name: "dt", shape: "(B, L, H)", precision: "storage", optional: false},
          %{name: "A", shape: "(H)", precision: "wide", optional: false},
          %{name: "B", shape: "(B, L, G, N)", precision: "storage", optional: false},
          %{name: "C", shape: "(B, L, G, N)", precision: "storage", optional: false},
          %{name: "D", shape: "(H) | (H, P)", precision: "wide", optional: true},
          %{name: "z", shape: "(B, L, H, P)", precision: "storage", optional: true},
          %{name: "dt_bias", shape: "(H)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, P, N)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, H, P)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, P, N)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "dt_softplus", takes: "flag", choices: [], range: :any, default: false, help: "apply softplus to dt + dt_bias"},
          %{name: "dt_clamp", takes: "pair", choices: [], range: :any, default: nil, help: "clamp dt to LO,HI, inclusive; no clamp by default"},
          %{name: "clamp_grad", takes: "text", choices: ["mask", "straight_through"], range: :any, default: "mask", help: "gradient of the clamp"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, P, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "ssd_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, length, heads, width) and (batch, length, groups, state)",
        inputs: [
          %{name: "x", shape: "(B, L, H, P)", precision: "storage", optional: false},
          %{name: "dt", shape: "(B, L, H)", precision: "storage", optional: false},
          %{name: "A", shape: "(H)", precision: "wide", optional: false},
          %{name: "B", shape: "(B, L, G, N)", precision: "storage", optional: false},
          %{name: "C", shape: "(B, L, G, N)", precision: "storage", optional: false},
          %{name: "D", shape: "(H) | (H, P)", precision: "wide", optional: true},
          %{name: "z", shape: "(B, L, H, P)", precision: "storage", optional: true},
          %{name: "dt_bias", shape: "(H)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, P, N)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, L, H, P)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, P, N)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "dt_softplus", takes: "flag", choices: [], range: :any, default: false, help: "apply softplus to dt + dt_bias"},
          %{name: "dt_clamp", takes: "pair", choices: [], range: :any, default: nil, help: "clamp dt to LO,HI, inclusive; no clamp by default"},
          %{name: "clamp_grad", takes: "text", choices: ["mask", "straight_through"], range: :any, default: "mask", help: "gradient of the clamp"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, P, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "ssd"
      },
      %{
        name: "gated_delta_rule",
        about: "Gated delta rule (Gated DeltaNet) over whole sequences",
        hint: "Layout is (batch, length, groups, keys) and (batch, length, heads, values)",
        inputs: [
          %{name: "q", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "beta", shape: "(B, L, H)", precision: "storage", optional: false},
          %{name: "g", shape: "(B, L, H)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, H, V)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, K, V)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "scale of q; 1 / sqrt(K) by default"},
          %{name: "qk_l2norm", takes: "flag", choices: [], range: :any, default: false, help: "divide q and k by their L2 norms"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, K, V)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "gated_delta_rule_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, length, groups, keys) and (batch, length, heads, values)",
        inputs: [
          %{name: "q", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "beta", shape: "(B, L, H)", precision: "storage", optional: false},
          %{name: "g", shape: "(B, L, H)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "scale of q; 1 / sqrt(K) by default"},
          %{name: "qk_l2norm", takes: "flag", choices: [], range: :any, default: false, help: "divide q and k by their L2 norms"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, K, V)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "gated_delta_rule"
      },
      %{
        name: "linear_attention",
        about: "Linear attention with decays (retention, GLA) over whole sequences",
        hint: "Layout is (batch, length, groups, keys) and (batch, length, heads, values)",
        inputs: [
          %{name: "q", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "g", shape: "(B, L, H) | (B, L, H, K)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "initial_z", shape: "(B, H, K)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, H, V)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, K, V)", precision: "wide", when: {:asked, :return_state}},
          %{name: "last_z", shape: "(B, H, K)", precision: "wide", when: {:asked, :return_z}}
        ],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "factor of q; 1 / sqrt(K) by default"},
          %{name: "normalize", takes: "flag", choices: [], range: :any, default: false, help: "divide y by the product of q and the sum of keys, z"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, K, V)"},
          %{name: "return_z", takes: "flag", choices: [], range: :any, default: false, help: "write last_z (B, H, K)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state", "dlast_z"],
        backward_of: nil
      },
      %{
        name: "linear_attention_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, length, groups, keys) and (batch, length, heads, values)",
        inputs: [
          %{name: "q", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, L, G, K)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "g", shape: "(B, L, H) | (B, L, H, K)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "initial_z", shape: "(B, H, K)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, L, H, V)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, K, V)", precision: "wide", optional: true},
          %{name: "dlast_z", shape: "(B, H, K)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "factor of q; 1 / sqrt(K) by default"},
          %{name: "normalize", takes: "flag", choices: [], range: :any, default: false, help: "divide y by the product of q and the sum of keys, z"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, K, V)"},
          %{name: "return_z", takes: "flag", choices: [], range: :any, default: false, help: "write last_z (B, H, K)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "linear_attention"
      },
      %{
        name: "linear_scan",
        about: "Linear recurrence h = a h + b over whole sequences",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "a", shape: "(B, L, K)", precision: "storage", optional: false},
          %{name: "b", shape: "(B, L, K)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, K)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "h", shape: "(B, L, K)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, K)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, K)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dh", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "linear_scan_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "a", shape: "(B, L, K)", precision: "storage", optional: false},
          %{name: "h", shape: "(B, L, K)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, K)", precision: "wide", optional: true},
          %{name: "dh", shape: "(B, L, K)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, K)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, K)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "linear_scan"
      },
      %{
        name: "exp_product_scan",
        about: "Cumulative product of decays in [0, 1] by the sum of their logarithms",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "gamma", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always},
          %{name: "log_y", shape: "(B, H, L, W)", precision: "wide", when: :always},
          %{name: "last_state", shape: "(B, H, W)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :share, default: 1.0e-8, help: "lower limit of the decays"},
          %{name: "log_min", takes: "float", choices: [], range: :not_positive, default: -5.0e1, help: "lower limit of the logarithms of decays"},
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlog_y", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "exp_product_scan_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "gamma", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dlog_y", shape: "(B, H, L, W)", precision: "wide", optional: true},
          %{name: "dlast_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :share, default: 1.0e-8, help: "lower limit of the decays"},
          %{name: "log_min", takes: "float", choices: [], range: :not_positive, default: -5.0e1, help: "lower limit of the logarithms of decays"},
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "exp_product_scan"
      },
      %{
        name: "cumprod_scan",
        about: "Cumulative product, exact for zeros",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "gamma", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, W)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "cumprod_scan_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "gamma", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "cumprod_scan"
      },
      %{
        name: "logcumsumexp",
        about: "Logarithm of the cumulative sum of exponentials",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, W)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "logcumsumexp_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "reverse", takes: "flag", choices: [], range: :any, default: false, help: "scan from the last step to the first"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "logcumsumexp"
      },
      %{
        name: "cumsum",
        about: "Cumulative sum",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, W)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "cumsum_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "cumsum"
      },
      %{
        name: "reverse_cumsum",
        about: "Cumulative sum from the end",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, H, W)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "reverse_cumsum_backward",
        about: "The gradient of an op",
        hint: "Layout is (batch, heads, length, channels of a head)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, H, W)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, H, W)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "reverse_cumsum"
      },
      %{
        name: "causal_conv1d",
        about: "Depthwise causal convolution over whole sequences",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D, W)", precision: "wide", optional: false},
          %{name: "bias", shape: "(D)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, W-1, D)", precision: "storage", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "activation", takes: "text", choices: ["silu"], range: :any, default: nil, help: "activation of the output; none by default"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, W-1, D)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "causal_conv1d_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D, W)", precision: "wide", optional: false},
          %{name: "bias", shape: "(D)", precision: "wide", optional: true},
          %{name: "initial_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["silu"], range: :any, default: nil, help: "activation of the output; none by default"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write last_state (B, W-1, D)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "causal_conv1d"
      },
      %{
        name: "causal_conv1d_update",
        about: "Depthwise causal convolution of one token",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, D)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, W-1, D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D, W)", precision: "wide", optional: false},
          %{name: "bias", shape: "(D)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, W-1, D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "activation", takes: "text", choices: ["silu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "linear",
        about: "Dense layer y = activation(x w^T + b)",
        hint: "Weights are stored (out, in), and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, I)", precision: "storage", optional: false},
          %{name: "b", shape: "(O)", precision: "storage", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(..., O)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "linear_backward",
        about: "The gradient of an op",
        hint: "Weights are stored (out, in), and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, I)", precision: "storage", optional: false},
          %{name: "b", shape: "(O)", precision: "storage", optional: true},
          %{name: "dy", shape: "(..., O)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "linear"
      },
      %{
        name: "mamba_block",
        about: "Mamba block: projections, convolution and scan",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, M)", precision: "storage", optional: false},
          %{name: "A_log", shape: "(D, N)", precision: "wide", optional: false},
          %{name: "in_proj", shape: "(2D, M)", precision: "storage", optional: false},
          %{name: "conv_w", shape: "(D, W)", precision: "wide", optional: false},
          %{name: "conv_b", shape: "(D)", precision: "wide", optional: true},
          %{name: "x_proj", shape: "(R+2N, D)", precision: "storage", optional: false},
          %{name: "dt_w", shape: "(D, R)", precision: "storage", optional: false},
          %{name: "dt_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "D", shape: "(D)", precision: "wide", optional: false},
          %{name: "out_proj", shape: "(M, D)", precision: "storage", optional: false},
          %{name: "in_proj_b", shape: "(2D)", precision: "storage", optional: true},
          %{name: "out_proj_b", shape: "(M)", precision: "storage", optional: true},
          %{name: "conv_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "ssm_state", shape: "(B, D, N)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, M)", precision: "storage", when: :always},
          %{name: "conv_state", shape: "(B, W-1, D)", precision: "storage", when: {:asked, :return_state}},
          %{name: "ssm_state", shape: "(B, D, N)", precision: "wide", when: {:asked, :return_state}}
        ],
        options: [
          %{name: "expand", takes: "integer", choices: [], range: :not_negative, default: nil, help: "ratio of inner width to model width; if given, must match the shapes"},
          %{name: "d_state", takes: "integer", choices: [], range: :not_negative, default: nil, help: "state size per channel; if given, must match the shapes"},
          %{name: "dt_rank", takes: "integer", choices: [], range: :not_negative, default: nil, help: "rank of dt's projection; if given, must match the shapes"},
          %{name: "d_conv", takes: "integer", choices: [], range: :not_negative, default: nil, help: "width of the convolution; if given, must match the shapes"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write conv_state (B, W-1, D) and ssm_state (B, D, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dconv_state", "dssm_state"],
        backward_of: nil
      },
      %{
        name: "mamba_block_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, M)", precision: "storage", optional: false},
          %{name: "A_log", shape: "(D, N)", precision: "wide", optional: false},
          %{name: "in_proj", shape: "(2D, M)", precision: "storage", optional: false},
          %{name: "conv_w", shape: "(D, W)", precision: "wide", optional: false},
          %{name: "conv_b", shape: "(D)", precision: "wide", optional: true},
          %{name: "x_proj", shape: "(R+2N, D)", precision: "storage", optional: false},
          %{name: "dt_w", shape: "(D, R)", precision: "storage", optional: false},
          %{name: "dt_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "D", shape: "(D)", precision: "wide", optional: false},
          %{name: "out_proj", shape: "(M, D)", precision: "storage", optional: false},
          %{name: "in_proj_b", shape: "(2D)", precision: "storage", optional: true},
          %{name: "out_proj_b", shape: "(M)", precision: "storage", optional: true},
          %{name: "conv_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "ssm_state", shape: "(B, D, N)", precision: "wide", optional: true},
          %{name: "dy", shape: "(B, L, M)", precision: "storage", optional: false},
          %{name: "dconv_state", shape: "(B, W-1, D)", precision: "storage", optional: true},
          %{name: "dssm_state", shape: "(B, D, N)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "expand", takes: "integer", choices: [], range: :not_negative, default: nil, help: "ratio of inner width to model width; if given, must match the shapes"},
          %{name: "d_state", takes: "integer", choices: [], range: :not_negative, default: nil, help: "state size per channel; if given, must match the shapes"},
          %{name: "dt_rank", takes: "integer", choices: [], range: :not_negative, default: nil, help: "rank of dt's projection; if given, must match the shapes"},
          %{name: "d_conv", takes: "integer", choices: [], range: :not_negative, default: nil, help: "width of the convolution; if given, must match the shapes"},
          %{name: "return_state", takes: "flag", choices: [], range: :any, default: false, help: "write conv_state (B, W-1, D) and ssm_state (B, D, N)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mamba_block"
      },
      %{
        name: "activations",
        about: "A function of each element",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(...)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(...)", precision: "storage", when: :always},
          %{name: "dydx", shape: "(...)", precision: "storage", when: {:asked, :return_derivative}}
        ],
        options: [
          %{name: "fn", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "the activation function; required"},
          %{name: "return_derivative", takes: "flag", choices: [], range: :any, default: false, help: "write dydx, the derivative of y with respect to x"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "activations_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(...)", precision: "storage", optional: false},
          %{name: "dy", shape: "(...)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "fn", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "the activation function; required"},
          %{name: "return_derivative", takes: "flag", choices: [], range: :any, default: false, help: "write dydx, the derivative of y with respect to x"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "activations"
      },
      %{
        name: "rms_norm",
        about: "Root mean square normalisation of rows",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-6, help: "epsilon of the norm"},
          %{name: "eps_mode", takes: "text", choices: ["inside", "outside"], range: :any, default: "inside", help: "add eps inside or outside the square root"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "rms_norm_backward",
        about: "The gradient of an op",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "dy", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-6, help: "epsilon of the norm"},
          %{name: "eps_mode", takes: "text", choices: ["inside", "outside"], range: :any, default: "inside", help: "add eps inside or outside the square root"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "rms_norm"
      },
      %{
        name: "layer_norm",
        about: "Layer normalisation of rows",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "b", shape: "(D)", precision: "wide", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(..., D)", precision: "storage", when: :always},
          %{name: "mean", shape: "(...)", precision: "wide", when: :always},
          %{name: "rstd", shape: "(...)", precision: "wide", when: :always}
        ],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norm"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "layer_norm_backward",
        about: "The gradient of an op",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "b", shape: "(D)", precision: "wide", optional: false},
          %{name: "dy", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norm"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "layer_norm"
      },
      %{
        name: "layer_norm_gelu",
        about: "Layer normalisation of rows, then GELU",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "b", shape: "(D)", precision: "wide", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norm"},
          %{name: "gelu", takes: "text", choices: ["tanh", "erf"], range: :any, default: "tanh", help: "GELU's form: exact or with tanh"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "layer_norm_gelu_backward",
        about: "The gradient of an op",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "b", shape: "(D)", precision: "wide", optional: false},
          %{name: "dy", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norm"},
          %{name: "gelu", takes: "text", choices: ["tanh", "erf"], range: :any, default: "tanh", help: "GELU's form: exact or with tanh"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "layer_norm_gelu"
      },
      %{
        name: "gated_rms_norm",
        about: "Root mean square normalisation of rows with a gate",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :positive, default: 1.0e-5, help: "epsilon of the norm"},
          %{name: "groups", takes: "integer", choices: [], range: :positive, default: 1, help: "number of equal groups of a row, each normalised separately"},
          %{name: "norm_before_gate", takes: "flag", choices: [], range: :any, default: false, help: "norm x before the gate: norm(x) silu(z) in place of norm(x silu(z))"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "gated_rms_norm_backward",
        about: "The gradient of an op",
        hint: "Rows are normalised over the last axis of x",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "w", shape: "(D)", precision: "wide", optional: false},
          %{name: "dy", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "eps", takes: "float", choices: [], range: :positive, default: 1.0e-5, help: "epsilon of the norm"},
          %{name: "groups", takes: "integer", choices: [], range: :positive, default: 1, help: "number of equal groups of a row, each normalised separately"},
          %{name: "norm_before_gate", takes: "flag", choices: [], range: :any, default: false, help: "norm x before the gate: norm(x) silu(z) in place of norm(x silu(z))"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "gated_rms_norm"
      },
      %{
        name: "matmul",
        about: "The product of two matrices",
        hint: "Columns of a meet rows of b",
        inputs: [
          %{name: "a", shape: "(M, K)", precision: "storage", optional: false},
          %{name: "b", shape: "(K, N)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "c", shape: "(M, N)", precision: "storage", when: :always}
        ],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dc"],
        backward_of: nil
      },
      %{
        name: "matmul_backward",
        about: "The gradient of an op",
        hint: "Columns of a meet rows of b",
        inputs: [
          %{name: "a", shape: "(M, K)", precision: "storage", optional: false},
          %{name: "b", shape: "(K, N)", precision: "storage", optional: false},
          %{name: "dc", shape: "(M, N)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "matmul"
      },
      %{
        name: "rope",
        about: "Rotary position embedding",
        hint: "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, width); those of masks and biases are always (batch, heads, queries, keys)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(B, H, L, W)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "theta", takes: "float", choices: [], range: :positive, default: 1.0e4, help: "base of the angles"},
          %{name: "first_position", takes: "integer", choices: [], range: :any, default: 0, help: "position of the first row"},
          %{name: "layout", takes: "text", choices: ["heads_first", "heads_last"], range: :any, default: "heads_first", help: "order of axes: (B, H, L, W) or (B, L, H, W)"},
          %{name: "scaling_factor", takes: "float", choices: [], range: :positive, default: nil, help: "scaling factor of Llama 3's frequency scaling; none by default"},
          %{name: "low_freq_factor", takes: "float", choices: [], range: :positive, default: 1.0e0, help: "low-frequency factor of that scaling"},
          %{name: "high_freq_factor", takes: "float", choices: [], range: :positive, default: 4.0e0, help: "high-frequency factor of that scaling"},
          %{name: "original_length", takes: "float", choices: [], range: :positive, default: 8.192e3, help: "context length before that scaling"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "rope_backward",
        about: "The gradient of an op",
        hint: "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, width); those of masks and biases are always (batch, heads, queries, keys)",
        inputs: [
          %{name: "x", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "dy", shape: "(B, H, L, W)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "theta", takes: "float", choices: [], range: :positive, default: 1.0e4, help: "base of the angles"},
          %{name: "first_position", takes: "integer", choices: [], range: :any, default: 0, help: "position of the first row"},
          %{name: "layout", takes: "text", choices: ["heads_first", "heads_last"], range: :any, default: "heads_first", help: "order of axes: (B, H, L, W) or (B, L, H, W)"},
          %{name: "scaling_factor", takes: "float", choices: [], range: :positive, default: nil, help: "scaling factor of Llama 3's frequency scaling; none by default"},
          %{name: "low_freq_factor", takes: "float", choices: [], range: :positive, default: 1.0e0, help: "low-frequency factor of that scaling"},
          %{name: "high_freq_factor", takes: "float", choices: [], range: :positive, default: 4.0e0, help: "high-frequency factor of that scaling"},
          %{name: "original_length", takes: "float", choices: [], range: :positive, default: 8.192e3, help: "context length before that scaling"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "rope"
      },
      %{
        name: "sinusoidal_positions",
        about: "Embeddings plus sines and cosines of their positions",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "theta", takes: "float", choices: [], range: :positive, default: 1.0e4, help: "base of the angles"},
          %{name: "first_position", takes: "integer", choices: [], range: :any, default: 0, help: "position of the first row"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "sinusoidal_positions_backward",
        about: "The gradient of an op",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "theta", takes: "float", choices: [], range: :positive, default: 1.0e4, help: "base of the angles"},
          %{name: "first_position", takes: "integer", choices: [], range: :any, default: 0, help: "position of the first row"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "sinusoidal_positions"
      },
      %{
        name: "attention",
        about: "Softmax attention over keys and values",
        hint: "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, width); those of masks and biases are always (batch, heads, queries, keys)",
        inputs: [
          %{name: "q", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, K, M, W)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, K, M, V)", precision: "storage", optional: false},
          %{name: "mask", shape: "(B|1, H|1, L|1, M|1)", precision: "mask", optional: true},
          %{name: "bias", shape: "(B|1, H|1, L|1, M|1)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "scale of the scores; 1 / sqrt(W) by default"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask keys after the query's position"},
          %{name: "q_offset", takes: "integer", choices: [], range: :any, default: nil, help: "position of the first query among the keys; M - L by default"},
          %{name: "layout", takes: "text", choices: ["heads_first", "heads_last"], range: :any, default: "heads_first", help: "order of axes: (B, H, L, W) or (B, L, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlse"],
        backward_of: nil
      },
      %{
        name: "attention_backward",
        about: "The gradient of an op",
        hint: "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, width); those of masks and biases are always (batch, heads, queries, keys)",
        inputs: [
          %{name: "q", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, K, M, W)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, K, M, V)", precision: "storage", optional: false},
          %{name: "mask", shape: "(B|1, H|1, L|1, M|1)", precision: "mask", optional: true},
          %{name: "bias", shape: "(B|1, H|1, L|1, M|1)", precision: "wide", optional: true},
          %{name: "y", shape: "(B, H, L, V)", precision: "storage", optional: false},
          %{name: "lse", shape: "(B, H, L)", precision: "wide", optional: false},
          %{name: "dy", shape: "(B, H, L, V)", precision: "storage", optional: false},
          %{name: "dlse", shape: "(B, H, L)", precision: "wide", optional: true},
          %{name: "cu_seqlens", shape: "(S+1)", precision: "i32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "scale of the scores; 1 / sqrt(W) by default"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask keys after the query's position"},
          %{name: "q_offset", takes: "integer", choices: [], range: :any, default: nil, help: "position of the first query among the keys; M - L by default"},
          %{name: "layout", takes: "text", choices: ["heads_first", "heads_last"], range: :any, default: "heads_first", help: "order of axes: (B, H, L, W) or (B, L, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "attention"
      },
      %{
        name: "decode",
        about: "Attention of new tokens over a cache of keys and values, which takes them in",
        hint: "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, width); a cache is always (batch, heads, length, width)",
        inputs: [
          %{name: "q", shape: "(B, H, L, W)", precision: "storage", optional: false},
          %{name: "k", shape: "(B, K, L, W)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, K, L, V)", precision: "storage", optional: false},
          %{name: "keys", shape: "(B, K, C, W)", precision: "storage", optional: false},
          %{name: "values", shape: "(B, K, C, V)", precision: "storage", optional: false},
          %{name: "mask", shape: "(B|1, H|1, L|1, M|1)", precision: "mask", optional: true},
          %{name: "bias", shape: "(B|1, H|1, L|1, M|1)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "cached", takes: "integer", choices: [], range: :not_negative, default: 0, help: "number of valid rows in the cache"},
          %{name: "scale", takes: "float", choices: [], range: :any, default: nil, help: "scale of the scores; 1 / sqrt(W) by default"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: true, help: "mask later tokens"},
          %{name: "layout", takes: "text", choices: ["heads_first", "heads_last"], range: :any, default: "heads_first", help: "order of axes: (B, H, L, W) or (B, L, H, W)"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "swiglu_mlp",
        about: "Gated feed-forward layer",
        hint: "Weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "wg", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wu", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wd", shape: "(D, F)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "y", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the gate; silu by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "swiglu_mlp_backward",
        about: "The gradient of an op",
        hint: "Weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "wg", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wu", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wd", shape: "(D, F)", precision: "storage", optional: false},
          %{name: "dy", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the gate; silu by default"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "swiglu_mlp"
      },
      %{
        name: "mha",
        about: "Multi-head self-attention with its projections",
        hint: "x is (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "wqkv", shape: "(3D, D)", precision: "storage", optional: false},
          %{name: "wo", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bo", shape: "(D)", precision: "storage", optional: true},
          %{name: "mask", shape: "(B|1, H|1, L|1, L|1)", precision: "mask", optional: true},
          %{name: "keys", shape: "(B, H, C, W)", precision: "storage", optional: true},
          %{name: "values", shape: "(B, H, C, W)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask later tokens"},
          %{name: "rope_theta", takes: "float", choices: [], range: :positive, default: nil, help: "base of the rotary angles; no rotation by default"},
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "cached", takes: "integer", choices: [], range: :not_negative, default: 0, help: "number of valid rows in the cache"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "mha_backward",
        about: "The gradient of an op",
        hint: "x is (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "wqkv", shape: "(3D, D)", precision: "storage", optional: false},
          %{name: "wo", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bo", shape: "(D)", precision: "storage", optional: true},
          %{name: "mask", shape: "(B|1, H|1, L|1, L|1)", precision: "mask", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask later tokens"},
          %{name: "rope_theta", takes: "float", choices: [], range: :positive, default: nil, help: "base of the rotary angles; no rotation by default"},
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "cached", takes: "integer", choices: [], range: :not_negative, default: 0, help: "number of valid rows in the cache"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mha"
      },
      %{
        name: "transformer_block",
        about: "Transformer block: self-attention and feed-forward layer, each behind a norm",
        hint: "x is (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "wqkv", shape: "(3D, D)", precision: "storage", optional: false},
          %{name: "wo", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bo", shape: "(D)", precision: "storage", optional: true},
          %{name: "ln1_w", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln1_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln2_w", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln2_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "wg", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wu", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wd", shape: "(D, F)", precision: "storage", optional: false},
          %{name: "mask", shape: "(B|1, H|1, L|1, L|1)", precision: "mask", optional: true},
          %{name: "keys", shape: "(B, H, C, W)", precision: "storage", optional: true},
          %{name: "values", shape: "(B, H, C, W)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask later tokens"},
          %{name: "rope_theta", takes: "float", choices: [], range: :positive, default: nil, help: "base of the rotary angles; no rotation by default"},
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "cached", takes: "integer", choices: [], range: :not_negative, default: 0, help: "number of valid rows in the cache"},
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norms"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy"],
        backward_of: nil
      },
      %{
        name: "transformer_block_backward",
        about: "The gradient of an op",
        hint: "x is (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "wqkv", shape: "(3D, D)", precision: "storage", optional: false},
          %{name: "wo", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bo", shape: "(D)", precision: "storage", optional: true},
          %{name: "ln1_w", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln1_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln2_w", shape: "(D)", precision: "wide", optional: false},
          %{name: "ln2_b", shape: "(D)", precision: "wide", optional: false},
          %{name: "wg", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wu", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "wd", shape: "(D, F)", precision: "storage", optional: false},
          %{name: "mask", shape: "(B|1, H|1, L|1, L|1)", precision: "mask", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"},
          %{name: "causal", takes: "flag", choices: [], range: :any, default: false, help: "mask later tokens"},
          %{name: "rope_theta", takes: "float", choices: [], range: :positive, default: nil, help: "base of the rotary angles; no rotation by default"},
          %{name: "pairing", takes: "text", choices: ["half", "interleaved"], range: :any, default: "half", help: "rotated pairs: x[i] and x[i+W/2], or adjacent elements"},
          %{name: "cached", takes: "integer", choices: [], range: :not_negative, default: 0, help: "number of valid rows in the cache"},
          %{name: "eps", takes: "float", choices: [], range: :not_negative, default: 1.0e-5, help: "epsilon of the norms"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "transformer_block"
      },
      %{
        name: "mdi_update",
        about: "Memory decay integration, element by element",
        hint: "All tensors have the shape of z",
        inputs: [
          %{name: "z", shape: "(...)", precision: "storage", optional: false},
          %{name: "h_old", shape: "(...)", precision: "storage", optional: false},
          %{name: "gate", shape: "(...)", precision: "storage", optional: false},
          %{name: "gamma", shape: "(...)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "h", shape: "(...)", precision: "storage", when: :always}
        ],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dh"],
        backward_of: nil
      },
      %{
        name: "mdi_update_backward",
        about: "The gradient of an op",
        hint: "All tensors have the shape of z",
        inputs: [
          %{name: "z", shape: "(...)", precision: "storage", optional: false},
          %{name: "h_old", shape: "(...)", precision: "storage", optional: false},
          %{name: "gate", shape: "(...)", precision: "storage", optional: false},
          %{name: "gamma", shape: "(...)", precision: "storage", optional: false},
          %{name: "dh", shape: "(...)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mdi_update"
      },
      %{
        name: "mdi_gamma",
        about: "How much of a memory is kept, from what comes in and maybe from a context",
        hint: "Weights are stored (out, in), and both networks have the same inner width",
        inputs: [
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "context", shape: "(..., D)", precision: "storage", optional: true},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: true},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: true},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: true},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: true}
        ],
        outputs: [
          %{name: "gamma", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dgamma"],
        backward_of: nil
      },
      %{
        name: "mdi_gamma_backward",
        about: "The gradient of an op",
        hint: "Weights are stored (out, in), and both networks have the same inner width",
        inputs: [
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "context", shape: "(..., D)", precision: "storage", optional: true},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: true},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: true},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: true},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: true},
          %{name: "dgamma", shape: "(..., D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mdi_gamma"
      },
      %{
        name: "mdi",
        about: "One step of memory decay integration",
        hint: "Weights are stored (out, in), and both networks have the same inner width",
        inputs: [
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "context", shape: "(..., D)", precision: "storage", optional: true},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: true},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: true},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: true},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: true},
          %{name: "h_prev", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "wm", shape: "(D, 2D)", precision: "storage", optional: false},
          %{name: "bm", shape: "(D)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "h_new", shape: "(..., D)", precision: "storage", when: :always},
          %{name: "gamma", shape: "(..., D)", precision: "storage", when: :always},
          %{name: "gate", shape: "(..., D)", precision: "storage", when: :always}
        ],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dh_new", "dgamma", "dgate"],
        backward_of: nil
      },
      %{
        name: "mdi_backward",
        about: "The gradient of an op",
        hint: "Weights are stored (out, in), and both networks have the same inner width",
        inputs: [
          %{name: "z", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "context", shape: "(..., D)", precision: "storage", optional: true},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: true},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: true},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: true},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: true},
          %{name: "h_prev", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "wm", shape: "(D, 2D)", precision: "storage", optional: false},
          %{name: "bm", shape: "(D)", precision: "storage", optional: false},
          %{name: "dh_new", shape: "(..., D)", precision: "storage", optional: false},
          %{name: "dgamma", shape: "(..., D)", precision: "storage", optional: true},
          %{name: "dgate", shape: "(..., D)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mdi"
      },
      %{
        name: "block_recurrence",
        about: "The gated recurrence of the MM-Rec block over whole sequences",
        hint: "Sequences are (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "z", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "gamma", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "w_gate", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "b_gate", shape: "(D)", precision: "storage", optional: false},
          %{name: "w_mix", shape: "(D, 2D)", precision: "storage", optional: true},
          %{name: "b_mix", shape: "(D)", precision: "storage", optional: true},
          %{name: "initial_state", shape: "(B, D)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "h", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, D)", precision: "wide", when: :always}
        ],
        options: [
          %{name: "mix", takes: "float", choices: [], range: :any, default: nil, help: "weight of the gated mean; 0.1 by default, 0 without w_mix and b_mix"},
          %{name: "state_clip", takes: "float", choices: [], range: :positive, default: nil, help: "clip state elements to [-state_clip, state_clip]; no clipping by default"},
          %{name: "state_norm", takes: "flag", choices: [], range: :any, default: false, help: "normalise the state by its root mean square after each step"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dh", "dlast_state"],
        backward_of: nil
      },
      %{
        name: "block_recurrence_backward",
        about: "The gradient of an op",
        hint: "Sequences are (batch, length, width), and weights are stored (out, in)",
        inputs: [
          %{name: "z", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "gamma", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "w_gate", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "b_gate", shape: "(D)", precision: "storage", optional: false},
          %{name: "w_mix", shape: "(D, 2D)", precision: "storage", optional: true},
          %{name: "b_mix", shape: "(D)", precision: "storage", optional: true},
          %{name: "initial_state", shape: "(B, D)", precision: "wide", optional: true},
          %{name: "h", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dh", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dlast_state", shape: "(B, D)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "mix", takes: "float", choices: [], range: :any, default: nil, help: "weight of the gated mean; 0.1 by default, 0 without w_mix and b_mix"},
          %{name: "state_clip", takes: "float", choices: [], range: :positive, default: nil, help: "clip state elements to [-state_clip, state_clip]; no clipping by default"},
          %{name: "state_norm", takes: "flag", choices: [], range: :any, default: false, help: "normalise the state by its root mean square after each step"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "block_recurrence"
      },
      %{
        name: "hds_construct",
        about: "Levels over a memory bank, each the adaptive average of the one below",
        hint: "A bank is (batch, slots, width), and k and v are alike",
        inputs: [
          %{name: "k", shape: "(B, M, D)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, M, D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "levels", takes: "integer", choices: [], range: :not_negative, default: 3, help: "number of levels, including the bank"},
          %{name: "ratio", takes: "integer", choices: [], range: :not_negative, default: 4, help: "slots pooled into one slot of the next level"},
          %{name: "cursor", takes: "integer", choices: [], range: :not_negative, default: 0, help: "oldest slot of the bank, if it is a ring"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dk1", "dv1", "dk2", "dv2", "dk3", "dv3", "dk4", "dv4", "dk5", "dv5", "dk6", "dv6", "dk7", "dv7", "dk8", "dv8", "dk9", "dv9", "dk10", "dv10", "dk11", "dv11", "dk12", "dv12", "dk13", "dv13", "dk14", "dv14", "dk15", "dv15"],
        backward_of: nil
      },
      %{
        name: "hds_construct_backward",
        about: "The gradient of an op",
        hint: "A bank is (batch, slots, width), and k and v are alike",
        inputs: [
          %{name: "k", shape: "(B, M, D)", precision: "storage", optional: false},
          %{name: "v", shape: "(B, M, D)", precision: "storage", optional: false},
          %{name: "dk1", shape: "(B, M1, D)", precision: "storage", optional: true},
          %{name: "dv1", shape: "(B, M1, D)", precision: "storage", optional: true},
          %{name: "dk2", shape: "(B, M2, D)", precision: "storage", optional: true},
          %{name: "dv2", shape: "(B, M2, D)", precision: "storage", optional: true},
          %{name: "dk3", shape: "(B, M3, D)", precision: "storage", optional: true},
          %{name: "dv3", shape: "(B, M3, D)", precision: "storage", optional: true},
          %{name: "dk4", shape: "(B, M4, D)", precision: "storage", optional: true},
          %{name: "dv4", shape: "(B, M4, D)", precision: "storage", optional: true},
          %{name: "dk5", shape: "(B, M5, D)", precision: "storage", optional: true},
          %{name: "dv5", shape: "(B, M5, D)", precision: "storage", optional: true},
          %{name: "dk6", shape: "(B, M6, D)", precision: "storage", optional: true},
          %{name: "dv6", shape: "(B, M6, D)", precision: "storage", optional: true},
          %{name: "dk7", shape: "(B, M7, D)", precision: "storage", optional: true},
          %{name: "dv7", shape: "(B, M7, D)", precision: "storage", optional: true},
          %{name: "dk8", shape: "(B, M8, D)", precision: "storage", optional: true},
          %{name: "dv8", shape: "(B, M8, D)", precision: "storage", optional: true},
          %{name: "dk9", shape: "(B, M9, D)", precision: "storage", optional: true},
          %{name: "dv9", shape: "(B, M9, D)", precision: "storage", optional: true},
          %{name: "dk10", shape: "(B, M10, D)", precision: "storage", optional: true},
          %{name: "dv10", shape: "(B, M10, D)", precision: "storage", optional: true},
          %{name: "dk11", shape: "(B, M11, D)", precision: "storage", optional: true},
          %{name: "dv11", shape: "(B, M11, D)", precision: "storage", optional: true},
          %{name: "dk12", shape: "(B, M12, D)", precision: "storage", optional: true},
          %{name: "dv12", shape: "(B, M12, D)", precision: "storage", optional: true},
          %{name: "dk13", shape: "(B, M13, D)", precision: "storage", optional: true},
          %{name: "dv13", shape: "(B, M13, D)", precision: "storage", optional: true},
          %{name: "dk14", shape: "(B, M14, D)", precision: "storage", optional: true},
          %{name: "dv14", shape: "(B, M14, D)", precision: "storage", optional: true},
          %{name: "dk15", shape: "(B, M15, D)", precision: "storage", optional: true},
          %{name: "dv15", shape: "(B, M15, D)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "levels", takes: "integer", choices: [], range: :not_negative, default: 3, help: "number of levels, including the bank"},
          %{name: "ratio", takes: "integer", choices: [], range: :not_negative, default: 4, help: "slots pooled into one slot of the next level"},
          %{name: "cursor", takes: "integer", choices: [], range: :not_negative, default: 0, help: "oldest slot of the bank, if it is a ring"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "hds_construct"
      },
      %{
        name: "hds_query_topk",
        about: "Attention over the slots that a walk down the levels of a memory finds",
        hint: "q is (batch, length, width), and a memory (batch or 1, slots, width)",
        inputs: [
          %{name: "q", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "k", shape: "(B|1, M, D)", precision: "storage", optional: false},
          %{name: "v", shape: "(B|1, M, D)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "levels", takes: "integer", choices: [], range: :not_negative, default: 3, help: "number of levels, including the bank"},
          %{name: "ratio", takes: "integer", choices: [], range: :not_negative, default: 4, help: "slots pooled into one slot of the next level"},
          %{name: "top_k", takes: "integer", choices: [], range: :not_negative, default: 4, help: "number of candidates selected per level"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "multi_memory_attention",
        about: "Attention of a sequence over a memory, with its projections",
        hint: "h is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)",
        inputs: [
          %{name: "h", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "k_mem", shape: "(B|1, S, D)", precision: "storage", optional: false},
          %{name: "v_mem", shape: "(B|1, S, D)", precision: "storage", optional: false},
          %{name: "waq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "baq", shape: "(D)", precision: "storage", optional: true},
          %{name: "wao", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bao", shape: "(D)", precision: "storage", optional: true},
          %{name: "q_in", shape: "(B, L, D)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dlse"],
        backward_of: nil
      },
      %{
        name: "multi_memory_attention_backward",
        about: "The gradient of an op",
        hint: "h is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)",
        inputs: [
          %{name: "h", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "k_mem", shape: "(B|1, S, D)", precision: "storage", optional: false},
          %{name: "v_mem", shape: "(B|1, S, D)", precision: "storage", optional: false},
          %{name: "waq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "baq", shape: "(D)", precision: "storage", optional: true},
          %{name: "wao", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bao", shape: "(D)", precision: "storage", optional: true},
          %{name: "q_in", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dlse", shape: "(B, H, L)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of heads"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "multi_memory_attention"
      },
      %{
        name: "mmrec_block",
        about: "Block of MM-Rec: gated recurrence, attention over a memory and feed-forward layer",
        hint: "x is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "k_mem", shape: "(B|1, M, D)", precision: "storage", optional: false},
          %{name: "v_mem", shape: "(B|1, M, D)", precision: "storage", optional: false},
          %{name: "n1", shape: "(D)", precision: "wide", optional: false},
          %{name: "n2", shape: "(D)", precision: "wide", optional: false},
          %{name: "wq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bq", shape: "(D)", precision: "storage", optional: false},
          %{name: "wk", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bk", shape: "(D)", precision: "storage", optional: false},
          %{name: "wv", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bv", shape: "(D)", precision: "storage", optional: false},
          %{name: "wz", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bz", shape: "(D)", precision: "storage", optional: false},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wgate", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bgate", shape: "(D)", precision: "storage", optional: false},
          %{name: "wm", shape: "(D, 2D)", precision: "storage", optional: true},
          %{name: "bm", shape: "(D)", precision: "storage", optional: true},
          %{name: "waq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "baq", shape: "(D)", precision: "storage", optional: false},
          %{name: "wao", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bao", shape: "(D)", precision: "storage", optional: false},
          %{name: "wf1", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "bf1", shape: "(F)", precision: "storage", optional: false},
          %{name: "wf2", shape: "(D, F)", precision: "storage", optional: false},
          %{name: "bf2", shape: "(D)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, D)", precision: "wide", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "h", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "last_state", shape: "(B, D)", precision: "wide", when: :always},
          %{name: "gamma", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "context", shape: "(B, L, D)", precision: "storage", when: :always},
          %{name: "summary", shape: "(B, D)", precision: "storage", when: :always},
          %{name: "q", shape: "(B, L, D)", precision: "storage", when: {:unless, :checkpoint}},
          %{name: "k", shape: "(B, L, D)", precision: "storage", when: {:unless, :checkpoint}},
          %{name: "v", shape: "(B, L, D)", precision: "storage", when: {:unless, :checkpoint}},
          %{name: "z", shape: "(B, L, D)", precision: "storage", when: {:unless, :checkpoint}},
          %{name: "hidden", shape: "(B, L, F)", precision: "storage", when: {:unless, :checkpoint}}
        ],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of attention heads"},
          %{name: "mix", takes: "float", choices: [], range: :any, default: nil, help: "weight of the gated mean; 0.1 by default, 0 without wm and bm"},
          %{name: "v_mix", takes: "float", choices: [], range: :any, default: 1.0e-1, help: "weight of v in the sum"},
          %{name: "eps", takes: "float", choices: [], range: :positive, default: 1.0e-6, help: "epsilon of the norms"},
          %{name: "norm", takes: "text", choices: ["inside", "outside"], range: :any, default: "outside", help: "add eps inside or outside the square root"},
          %{name: "levels", takes: "integer", choices: [], range: :not_negative, default: 3, help: "number of levels, including the bank"},
          %{name: "ratio", takes: "integer", choices: [], range: :not_negative, default: 4, help: "slots pooled into one slot of the next level"},
          %{name: "cursor", takes: "integer", choices: [], range: :not_negative, default: 0, help: "oldest slot of the memory, if it is a ring"},
          %{name: "state_clip", takes: "float", choices: [], range: :positive, default: nil, help: "clip state elements to [-state_clip, state_clip]; no clipping by default"},
          %{name: "state_norm", takes: "flag", choices: [], range: :any, default: false, help: "normalise the state by its root mean square after each step"},
          %{name: "checkpoint", takes: "flag", choices: [], range: :any, default: true, help: "recompute activations in the backward pass"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: ["dy", "dh", "dlast_state", "dgamma", "dcontext", "dsummary"],
        backward_of: nil
      },
      %{
        name: "mmrec_block_backward",
        about: "The gradient of an op",
        hint: "x is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)",
        inputs: [
          %{name: "x", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "k_mem", shape: "(B|1, M, D)", precision: "storage", optional: false},
          %{name: "v_mem", shape: "(B|1, M, D)", precision: "storage", optional: false},
          %{name: "n1", shape: "(D)", precision: "wide", optional: false},
          %{name: "n2", shape: "(D)", precision: "wide", optional: false},
          %{name: "wq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bq", shape: "(D)", precision: "storage", optional: false},
          %{name: "wk", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bk", shape: "(D)", precision: "storage", optional: false},
          %{name: "wv", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bv", shape: "(D)", precision: "storage", optional: false},
          %{name: "wz", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bz", shape: "(D)", precision: "storage", optional: false},
          %{name: "wg1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bg1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wg2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bg2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wc1", shape: "(I, D)", precision: "storage", optional: false},
          %{name: "bc1", shape: "(I)", precision: "storage", optional: false},
          %{name: "wc2", shape: "(D, I)", precision: "storage", optional: false},
          %{name: "bc2", shape: "(D)", precision: "storage", optional: false},
          %{name: "wgate", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bgate", shape: "(D)", precision: "storage", optional: false},
          %{name: "wm", shape: "(D, 2D)", precision: "storage", optional: true},
          %{name: "bm", shape: "(D)", precision: "storage", optional: true},
          %{name: "waq", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "baq", shape: "(D)", precision: "storage", optional: false},
          %{name: "wao", shape: "(D, D)", precision: "storage", optional: false},
          %{name: "bao", shape: "(D)", precision: "storage", optional: false},
          %{name: "wf1", shape: "(F, D)", precision: "storage", optional: false},
          %{name: "bf1", shape: "(F)", precision: "storage", optional: false},
          %{name: "wf2", shape: "(D, F)", precision: "storage", optional: false},
          %{name: "bf2", shape: "(D)", precision: "storage", optional: false},
          %{name: "initial_state", shape: "(B, D)", precision: "wide", optional: true},
          %{name: "h", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "gamma", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "context", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "q", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "k", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "v", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "z", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "hidden", shape: "(B, L, F)", precision: "storage", optional: true},
          %{name: "dy", shape: "(B, L, D)", precision: "storage", optional: false},
          %{name: "dh", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dlast_state", shape: "(B, D)", precision: "wide", optional: true},
          %{name: "dgamma", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dcontext", shape: "(B, L, D)", precision: "storage", optional: true},
          %{name: "dsummary", shape: "(B, D)", precision: "storage", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "heads", takes: "integer", choices: [], range: :not_negative, default: 1, help: "number of attention heads"},
          %{name: "mix", takes: "float", choices: [], range: :any, default: nil, help: "weight of the gated mean; 0.1 by default, 0 without wm and bm"},
          %{name: "v_mix", takes: "float", choices: [], range: :any, default: 1.0e-1, help: "weight of v in the sum"},
          %{name: "eps", takes: "float", choices: [], range: :positive, default: 1.0e-6, help: "epsilon of the norms"},
          %{name: "norm", takes: "text", choices: ["inside", "outside"], range: :any, default: "outside", help: "add eps inside or outside the square root"},
          %{name: "levels", takes: "integer", choices: [], range: :not_negative, default: 3, help: "number of levels, including the bank"},
          %{name: "ratio", takes: "integer", choices: [], range: :not_negative, default: 4, help: "slots pooled into one slot of the next level"},
          %{name: "cursor", takes: "integer", choices: [], range: :not_negative, default: 0, help: "oldest slot of the memory, if it is a ring"},
          %{name: "state_clip", takes: "float", choices: [], range: :positive, default: nil, help: "clip state elements to [-state_clip, state_clip]; no clipping by default"},
          %{name: "state_norm", takes: "flag", choices: [], range: :any, default: false, help: "normalise the state by its root mean square after each step"},
          %{name: "checkpoint", takes: "flag", choices: [], range: :any, default: true, help: "recompute activations in the backward pass"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: "mmrec_block"
      },
      %{
        name: "write_short",
        about: "Rows into the slots of a memory bank",
        hint: "A bank is (batch, slots, width)",
        inputs: [
          %{name: "bank", shape: "(B, S, D)", precision: "storage", optional: false},
          %{name: "rows", shape: "(B, N, D)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "bank", shape: "(B, S, D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "start", takes: "integer", choices: [], range: :not_negative, default: 0, help: "slot of the first row"},
          %{name: "mode", takes: "text", choices: ["ring", "strict"], range: :any, default: "ring", help: "handling of rows past the last slot"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "write_long",
        about: "A summary into the slots of a memory bank",
        hint: "A bank is (batch, slots, width)",
        inputs: [
          %{name: "bank", shape: "(B, M, D)", precision: "storage", optional: false},
          %{name: "summary", shape: "(B, D)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "bank", shape: "(B, M, D)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "policy", takes: "text", choices: ["ring", "ema", "broadcast"], range: :any, default: "ring", help: "how slots are selected for the write"},
          %{name: "cursor", takes: "integer", choices: [], range: :not_negative, default: 0, help: "slot to write, with policy ring"},
          %{name: "decay", takes: "float", choices: [], range: :share, default: 9.9e-1, help: "decay of a slot, with policy ema"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "quantize",
        about: "Rows of floats to blocks of 8 or 4 bits a value, ggml's Q8_0 or Q4_0",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., N)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "format", takes: "text", choices: ["q8_0", "q4_0"], range: :any, default: "q8_0", help: "format of the blocks"},
          %{name: "unchecked", takes: "flag", choices: [], range: :any, default: false, help: "store infinite scales, as ggml does, instead of failing"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "dequantize",
        about: "Blocks of Q8_0 or Q4_0 to rows of f32",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "q", shape: "(..., Q)", precision: "u8", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "format", takes: "text", choices: ["q8_0", "q4_0"], range: :any, default: "q8_0", help: "format of the blocks"}
        ],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_q8_q8",
        about: "y = activation(x w^T + b), x quantized to Q8_0, weights in Q8_0",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, 17I/16)", precision: "u8", optional: false},
          %{name: "b", shape: "(O)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_q8_q4",
        about: "y = activation(x w^T + b), x quantized to Q8_0, weights in Q4_0",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, 9I/16)", precision: "u8", optional: false},
          %{name: "b", shape: "(O)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_f32_q8",
        about: "y = activation(x w^T + b), weights in Q8_0",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, 17I/16)", precision: "u8", optional: false},
          %{name: "b", shape: "(O)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_f32_q4",
        about: "y = activation(x w^T + b), weights in Q4_0",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, 9I/16)", precision: "u8", optional: false},
          %{name: "b", shape: "(O)", precision: "wide", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "convert_ternary",
        about: "Ternary numbers from one layout to another; -1, 0 and 1 to planes and back",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "values", shape: "(..., N)", precision: "i8", optional: true},
          %{name: "plane0", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "plane1", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "packed2", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "offset_rows", shape: "(R, N)", precision: "u8", optional: true},
          %{name: "byte0", shape: "(..., N)", precision: "u8", optional: true},
          %{name: "byte1", shape: "(..., N)", precision: "u8", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "to", takes: "text", choices: ["values", "planes", "packed2", "offset_rows", "byte_planes"], range: :any, default: nil, help: "layout of the results; planes by default"},
          %{name: "n", takes: "integer", choices: [], range: :not_negative, default: nil, help: "cells per row of planes or packed2; as many as fit by default"},
          %{name: "rows", takes: "integer", choices: [], range: :not_negative, default: nil, help: "rows of offset_rows; as many as fit by default"},
          %{name: "on_sentinel", takes: "text", choices: ["error", "zero", "warn"], range: :any, default: "error", help: "handling of sentinel cells"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "stats_ternary",
        about: "Counts of -1, 0, +1 and sentinels among ternary numbers, and the first sentinel",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "values", shape: "(..., N)", precision: "i8", optional: true},
          %{name: "plane0", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "plane1", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "packed2", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "offset_rows", shape: "(R, N)", precision: "u8", optional: true},
          %{name: "byte0", shape: "(..., N)", precision: "u8", optional: true},
          %{name: "byte1", shape: "(..., N)", precision: "u8", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "n", takes: "integer", choices: [], range: :not_negative, default: nil, help: "cells per row of planes or packed2; as many as fit by default"},
          %{name: "rows", takes: "integer", choices: [], range: :not_negative, default: nil, help: "rows of offset_rows; as many as fit by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "quantize_ternary",
        about: "Floats to planes of ternary numbers and their scale",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "w", shape: "(..., N)", precision: "storage", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "rule", takes: "text", choices: ["threshold", "absmean", "twn"], range: :any, default: "absmean", help: "rule for the threshold"},
          %{name: "threshold", takes: "float", choices: [], range: :any, default: nil, help: "with rule threshold: larger magnitudes become 1 or -1"},
          %{name: "per_row", takes: "flag", choices: [], range: :any, default: false, help: "compute a mean per row; one for the tensor by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "dequantize_ternary",
        about: "Ternary numbers in planes times their scale, as f32",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "plane0", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "plane1", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "scale", shape: "(O|1)", precision: "f32", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "n", takes: "integer", choices: [], range: :not_negative, default: nil, help: "cells per row of planes or packed2; as many as fit by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "activation_i8",
        about: "Activations to 8 bits, each row with its own scale",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "q", shape: "(..., I)", precision: "i8", when: :always},
          %{name: "scale", shape: "(...)", precision: "f32", when: :always}
        ],
        options: [
          %{name: "amax_floor", takes: "float", choices: [], range: :any, default: 1.0e-5, help: "lower limit of a row's largest magnitude"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "dot_ternary",
        about: "Sums of products of two rows of ternary numbers in planes",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "a0", shape: "(..., P)", precision: "u8", optional: false},
          %{name: "a1", shape: "(..., P)", precision: "u8", optional: false},
          %{name: "b0", shape: "(..., P)", precision: "u8", optional: false},
          %{name: "b1", shape: "(..., P)", precision: "u8", optional: false}
        ],
        outputs: [
          %{name: "dot", shape: "(...)", precision: "i32", when: :always}
        ],
        options: [],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_ternary",
        about: "Signs of activations by ternary weights",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: true},
          %{name: "x_plane0", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "x_plane1", shape: "(..., P)", precision: "u8", optional: true},
          %{name: "plane0", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "plane1", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "w_scale", shape: "(O|1)", precision: "f32", optional: true},
          %{name: "bias", shape: "(O)", precision: "f32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"},
          %{name: "return_sums", takes: "flag", choices: [], range: :any, default: false, help: "also return the int8 activations and the integer sums"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_i8_ternary",
        about: "Activations of 8 bits by ternary weights",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "plane0", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "plane1", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "w_scale", shape: "(O|1)", precision: "f32", optional: true},
          %{name: "bias", shape: "(O)", precision: "f32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"},
          %{name: "return_sums", takes: "flag", choices: [], range: :any, default: false, help: "also return the int8 activations and the integer sums"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "matmul_f32_ternary",
        about: "Activations by ternary weights",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "plane0", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "plane1", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "w_scale", shape: "(O|1)", precision: "f32", optional: true},
          %{name: "bias", shape: "(O)", precision: "f32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"},
          %{name: "return_sums", takes: "flag", choices: [], range: :any, default: false, help: "also return the int8 activations and the integer sums"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "ternary_linear",
        about: "Dense layer of float weights that a rule makes ternary",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w", shape: "(O, I)", precision: "storage", optional: false},
          %{name: "bias", shape: "(O)", precision: "f32", optional: true}
        ],
        outputs: [
          %{name: "y", shape: "(..., O)", precision: "storage", when: :always}
        ],
        options: [
          %{name: "rule", takes: "text", choices: ["threshold", "absmean", "twn"], range: :any, default: "absmean", help: "rule for the threshold"},
          %{name: "threshold", takes: "float", choices: [], range: :any, default: nil, help: "with rule threshold: larger magnitudes become 1 or -1"},
          %{name: "per_row", takes: "flag", choices: [], range: :any, default: false, help: "compute a mean per row; one for the tensor by default"},
          %{name: "activations", takes: "text", choices: ["ternary", "i8", "f32"], range: :any, default: "i8", help: "representation of x in the product"},
          %{name: "activation", takes: "text", choices: ["sigmoid", "silu", "gelu", "gelu_tanh", "gelu_erf", "softplus", "relu"], range: :any, default: nil, help: "activation of the output; none by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "simple_rotor_net",
        about: "Two ternary layers: logits of signs, and the class with the largest",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "x", shape: "(..., I)", precision: "storage", optional: false},
          %{name: "w1_plane0", shape: "(H, P)", precision: "u8", optional: false},
          %{name: "w1_plane1", shape: "(H, P)", precision: "u8", optional: false},
          %{name: "b1", shape: "(H)", precision: "f32", optional: false},
          %{name: "w2_plane0", shape: "(O, Q)", precision: "u8", optional: false},
          %{name: "w2_plane1", shape: "(O, Q)", precision: "u8", optional: false},
          %{name: "b2", shape: "(O)", precision: "f32", optional: false},
          %{name: "w1_scale", shape: "(H|1)", precision: "f32", optional: true},
          %{name: "w2_scale", shape: "(O|1)", precision: "f32", optional: true}
        ],
        outputs: [],
        options: [
          %{name: "scales", takes: "flag", choices: [], range: :any, default: false, help: "multiply the integer sums by w1_scale and w2_scale"},
          %{name: "in", takes: "integer", choices: [], range: :not_negative, default: nil, help: "columns of x, to check"},
          %{name: "hidden", takes: "integer", choices: [], range: :not_negative, default: nil, help: "width of the hidden layer, to check"},
          %{name: "out", takes: "integer", choices: [], range: :not_negative, default: nil, help: "number of logits, to check"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "argmax",
        about: "The place of the largest number of each row, the first on ties; NaN is never larger",
        hint: "Layout is channel-last: batch, length, channels",
        inputs: [
          %{name: "x", shape: "(..., N)", precision: "storage", optional: false}
        ],
        outputs: [
          %{name: "class", shape: "(...)", precision: "i32", when: :always}
        ],
        options: [],
        storage: ["f64", "f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "column_sums_ternary",
        about: "Sums of the columns of ternary weights in planes, to prove products by",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "plane0", shape: "(O, P)", precision: "u8", optional: false},
          %{name: "plane1", shape: "(O, P)", precision: "u8", optional: false}
        ],
        outputs: [],
        options: [
          %{name: "n", takes: "integer", choices: [], range: :not_negative, default: nil, help: "cells per row of planes or packed2; as many as fit by default"}
        ],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      },
      %{
        name: "verify_sums_ternary",
        about: "Proves sums of a product by those of the weights' columns; an error if they differ",
        hint: "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`",
        inputs: [
          %{name: "acc", shape: "(..., O)", precision: "i32", optional: false},
          %{name: "column_sums", shape: "(I)", precision: "i32", optional: false},
          %{name: "xq", shape: "(..., I)", precision: "i8", optional: false}
        ],
        outputs: [
          %{name: "difference", shape: "(...)", precision: "i64", when: :always}
        ],
        options: [],
        storage: ["f32", "bf16", "f16"],
        cotangents: [],
        backward_of: nil
      }
    ]
  end
end
