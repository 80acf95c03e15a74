// RUN: secc opt %s -p 'coarsen{min-share=0.05}' | filecheck %s

// Work is FLOPs times the passes of the mode, at the mean sizes of the dataset's samples: the audio tower does 2 % of it, as only one
// sample in ten has a clip, and joins the decoder; its predicate joins, too.

sec.graph "listener" optional ["audio"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "audio" dim 0
  sec.pattern when [] share "0.9" {B = 1, n = 0}
  sec.pattern when ["audio"] share "0.1" {B = 1, n = 1}
  sec.block "audio" class "A" params 5 trainable 5 component "audio" layers 2 when ["audio"]
  sec.block "decoder" class "D" params 5 trainable 5 component "decoder" layers 2 when []
  // CHECK: sec.section "decoder" mode "train" when [] blocks ["audio", "decoder"]
  // CHECK-NEXT: sec.case
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %h = sec.call "decoder" (%ids) args "$0" outs [""] {mode = "train", flops = "1000*B"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
  sec.case "sound" when ["audio"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %a = sec.input "audio" : !sec.tensor<[n, 80], f32>
    %f = sec.call "audio" (%a) args "$0" outs [""] {mode = "train", flops = "200*n"} : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "decoder" (%ids, %f) args "$0, $1" outs [""] {mode = "train", flops = "1000*B"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
