// RUN: secc opt %s -p lower | filecheck %s

// A section's bodies are told apart by the optional keys that change its code alone; equal ones are one body with several patterns. The
// glue on inputs is repeated where it is needed. Terms give their numerators here, and their coefficients once for the whole batch.

sec.graph "three" optional ["audio", "hint", "px"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.block "vision" class "V" params 300 trainable 300
  sec.block "lm" class "L" params 900 trainable 900
  sec.section "vision" mode "train" when ["px"] blocks ["vision"]
  sec.section "lm" mode "train" when [] blocks ["lm"]
  // CHECK: sec.edge "vision" from @vision to @lm dim 0 rows "n" : !sec.tensor<[n, 8], f32, grad>
  // CHECK-NEXT: sec.body "always" in @vision when [] {
  // CHECK-NEXT:   sec.input "px"
  // CHECK-NEXT:   sec.call "vision"
  // CHECK-NEXT:   sec.send "vision"
  // CHECK-NEXT: }
  // CHECK-NEXT: sec.body "without_optional" in @lm when [] also ["audio"] {
  // CHECK-NEXT:   sec.input "ids"
  // CHECK-NEXT:   sec.glue "aten.ne.Scalar"
  // CHECK-NEXT:   sec.call "lm"
  // CHECK-NEXT:   sec.glue "aten.sum.default"
  // CHECK-NEXT:   sec.term "loss" (%{{[^,]*}}) at "m.py:3"
  // CHECK-NEXT: }
  // CHECK-NEXT: sec.body "with_px" in @lm when ["px"] {
  // CHECK:        sec.receive "vision" : !sec.tensor<[n, 8], f32, grad>
  // CHECK:      sec.body "with_audio_and_px" in @lm when ["audio", "px"] {
  // CHECK:        sec.glue "aten.neg.default"
  // CHECK:      sec.body "leaves_count" in @terms when [] {
  // CHECK-NEXT:   sec.input "ids"
  // CHECK-NEXT:   sec.glue "aten.ne.Scalar"
  // CHECK-NEXT:   sec.glue "aten.sum.default"
  // CHECK-NEXT:   sec.leaf "count"
  // CHECK-NEXT: }
  // CHECK-NEXT: sec.body "coefficients" in @terms when [] {
  // CHECK-NEXT:   sec.receive "count"
  // CHECK-NEXT:   sec.glue "aten.reciprocal.default"
  // CHECK-NEXT:   sec.term "loss" (%{{[^,]*}}) at "m.py:3"
  // CHECK-NEXT: }
  // CHECK-NOT: sec.case
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %v = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" at "m.py:1" : !sec.tensor<[B], bool>
    %h = sec.call "lm" (%ids, %v) args "$0, $1" outs [""] in @lm at "m.py:3" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm at "m.py:3" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.sum.default" (%v) args "$0" at "m.py:3" : !sec.tensor<[], i64>
    %leaf = sec.leaf "count" (%c) : !sec.tensor<[], f64>
    %w = sec.glue "aten.reciprocal.default" (%leaf) args "$0" : !sec.tensor<[], f64>
    sec.term "loss" (%l, %w) in @lm at "m.py:3"
    sec.return constant "0.0"
  }
  sec.case "hint" when ["hint"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %v = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" at "m.py:1" : !sec.tensor<[B], bool>
    %h = sec.call "lm" (%ids, %v) args "$0, $1" outs [""] in @lm at "m.py:3" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm at "m.py:3" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.sum.default" (%v) args "$0" at "m.py:3" : !sec.tensor<[], i64>
    %leaf = sec.leaf "count" (%c) : !sec.tensor<[], f64>
    %w = sec.glue "aten.reciprocal.default" (%leaf) args "$0" : !sec.tensor<[], f64>
    sec.term "loss" (%l, %w) in @lm at "m.py:3"
    sec.return constant "0.0"
  }
  sec.case "audio" when ["audio"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %v = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" at "m.py:1" : !sec.tensor<[B], bool>
    %h = sec.call "lm" (%ids, %v) args "$0, $1" outs [""] in @lm at "m.py:3" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm at "m.py:3" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.sum.default" (%v) args "$0" at "m.py:3" : !sec.tensor<[], i64>
    %leaf = sec.leaf "count" (%c) : !sec.tensor<[], f64>
    %w = sec.glue "aten.reciprocal.default" (%leaf) args "$0" : !sec.tensor<[], f64>
    sec.term "loss" (%l, %w) in @lm at "m.py:3"
    sec.return constant "0.0"
  }
  sec.case "image" when ["px"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %v = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" at "m.py:1" : !sec.tensor<[B], bool>
    %px = sec.input "px" : !sec.tensor<[n, 64], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] in @vision at "m.py:2" : !sec.tensor<[n, 8], f32, grad>
    %t = sec.transfer "vision" (%f) from @vision to @lm dim 0 rows "n" : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "lm" (%ids, %v, %t) args "$0, $1, $2" outs [""] in @lm at "m.py:3" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm at "m.py:3" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.sum.default" (%v) args "$0" at "m.py:3" : !sec.tensor<[], i64>
    %leaf = sec.leaf "count" (%c) : !sec.tensor<[], f64>
    %w = sec.glue "aten.reciprocal.default" (%leaf) args "$0" : !sec.tensor<[], f64>
    sec.term "loss" (%l, %w) in @lm at "m.py:3"
    sec.return constant "0.0"
  }
  sec.case "both" when ["audio", "px"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %v = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" at "m.py:1" : !sec.tensor<[B], bool>
    %px = sec.input "px" : !sec.tensor<[n, 64], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] in @vision at "m.py:2" : !sec.tensor<[n, 8], f32, grad>
    %t = sec.transfer "vision" (%f) from @vision to @lm dim 0 rows "n" : !sec.tensor<[n, 8], f32, grad>
    %u = sec.glue "aten.neg.default" (%t) args "$0" in @lm at "m.py:2" : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "lm" (%ids, %v, %u) args "$0, $1, $2" outs [""] in @lm at "m.py:3" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm at "m.py:3" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.sum.default" (%v) args "$0" at "m.py:3" : !sec.tensor<[], i64>
    %leaf = sec.leaf "count" (%c) : !sec.tensor<[], f64>
    %w = sec.glue "aten.reciprocal.default" (%leaf) args "$0" : !sec.tensor<[], f64>
    sec.term "loss" (%l, %w) in @lm at "m.py:3"
    sec.return constant "0.0"
  }
}
