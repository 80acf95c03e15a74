builtin.module {
  sec.graph "llava" optional ["pixel_values"] labels "labels" widths "own" {
    sec.symbol "B" kind "rows" key "input_ids" dim 0
    sec.symbol "S" kind "width" key "input_ids" dim 1
    sec.symbol "n" kind "rows" key "pixel_values" dim 0
    sec.pattern when ["pixel_values"] share "0.5" {B = 1 : i64, S = 80 : i64, n = 2.500000e+00 : f64}
    %0 = sec.key "pixel_values" optional : !sec.tensor<[n, 3, 32, 32], f32>
    %1 = sec.key "input_ids" pads ["1 right 0"] : !sec.tensor<[B, S], i64>
    sec.block "tower" class "Tower" params 303 trainable 3 component "tower" layers 2 when ["pixel_values"] couples #sec.coupling<"batch_norm", "aten.native_batch_norm.default", "modèle.py:4"> at "modèle.py:3" {note = "text"}
    sec.block "lm" class "LM" params 4 trainable 4
    sec.cut "lm.mlp" block "lm" tp 2 styles [#sec.style<"lm.mlp.up", "colwise">] shards [#sec.shard<"lm.mlp.up.weight", 0, [8, 8]>] partial ["lm.norm"] whole [#sec.unsplit<"lm.x", "small", "", 0, 0>]
    sec.tie names ["lm.head.weight", "lm.embed.weight"]
    sec.rewrite "swiglu_mlp" rules ["swiglu"] class "MLP" method "forward" function "act" modules ["lm.mlp"] code ["9 def swiglu_mlp(self, x):", "10     return x"] at "model.py:9"
    sec.section "vision" mode "train" when ["pixel_values"] blocks ["tower"] {dp = 2 : i64}
    sec.section "language" mode "train" when [] blocks ["lm"]
    %2 = sec.edge "features" from @vision to @language dim 0 rows "576*n" extents [#sec.extent<1, "S", "right">] : !sec.tensor<["576*n", 16], f32, grad>
    sec.case "c0" when ["pixel_values"] {
      %3 = sec.input "pixel_values" : !sec.tensor<[n, 3, 32, 32], f32>
      %4, %5 = sec.call "tower" (%3) args "$0, [B, S - 1], dtype=torch.float32" outs [".last_hidden_state", "[\22a b\22]"] no_grad autocast "\22cpu\22, dtype=torch.bfloat16" in @vision at "model.py:3" {flops = "8*n"} : !sec.tensor<["576*n", 16], f32, grad>, !sec.tensor<[n, "S//2"], bf16>
      %6 = sec.transfer "features" (%4) from @vision to @language dim 0 rows "576*n" extents [#sec.extent<1, "S", "right">] : !sec.tensor<["576*n", 16], f32, grad>
      %7 = sec.param "newline" : !sec.tensor<[16], f32, grad>
      %8 = sec.const "constant_0" {value = "0.5"} : !sec.tensor<[], f32>
      %9 = sec.glue "aten.any.default" (%3) args "$0" : !sec.tensor<[], bool>
      sec.guard (%9) equals "True" at "model.py:4"
      %10 = sec.glue "aten.sum.default" (%6) args "$0" in @language : !sec.tensor<[], f32, grad>
      %11 = sec.leaf "loss.count" (%9) : !sec.tensor<[], f64>
      %12 = sec.size "B*S" : !sec.tensor<[], f64>
      sec.placed_rows "aten.masked_scatter.default" (%9) rows "n" at "model.py:4"
      sec.term "loss" (%10, %12) in @language at "model.py:9"
      sec.output "scores" (%5) dim 0 rows "1" in @language at "model.py:9"
      sec.return constant "0.0"
    }
    sec.body "c0" in @vision when ["pixel_values"] {
      %13 = sec.receive "features" : !sec.tensor<["576*n", 16], f32, grad>
      sec.send "features" (%13)
    }
  }
}
