// RUN: secc opt %s -p 'coarsen{min-share=0.05 cluster="1x3xcpu" small-stacks="keep" step-ns=1200000,1300000}' | filecheck %s
// RUN: secc opt %s -p 'coarsen{min-share=0.05 cluster="1x1xcpu" small-stacks="merge" step-ns=1200000,1300000 simulated=true}' | filecheck %s --check-prefix=MERGE
// RUN: secc opt %s -p 'coarsen{min-share=0.05 cluster="1x3xcpu" small-stacks="merge"}' | filecheck %s --check-prefix=ONLY
// RUN: secc opt %s -p 'coarsen{min-share=0.05 cluster="1x3xcpu"}' | filecheck %s --check-prefix=SHARE

// The audio tower does 2 % of the work. Its share decides unless `small-stacks` says to keep or to merge it; the notes then name the step
// times of both plans, or the share where only one of the plans fits.

sec.graph "listener" optional ["audio"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "audio" dim 0
  sec.pattern when [] share "0.9" {B = 1, n = 0}
  sec.pattern when ["audio"] share "0.1" {B = 1, n = 1}
  sec.block "audio" class "A" params 60000000 trainable 60000000 component "audio" layers 2 when ["audio"]
  sec.block "decoder" class "D" params 5 trainable 5 component "decoder" layers 2 when []
  // CHECK: sec.section "audio" mode "train" when ["audio"] blocks ["audio"]
  // CHECK-SAME: notes = ["audio stays a section: 0.02 of the work, a step of 0.0012 s by closed forms, 0.0013 s in another section"]
  // CHECK-NEXT: sec.section "decoder" mode "train" when [] blocks ["decoder"]
  // MERGE: sec.section "decoder" mode "train" when [] blocks ["audio", "decoder"]
  // MERGE-SAME: notes = ["audio joined decoder: 0.02 of the work, a step of 0.0012 s as simulated, 0.0013 s as a section of its own"]
  // ONLY: sec.section "decoder" mode "train" when [] blocks ["audio", "decoder"]
  // ONLY-SAME: notes = ["audio joined decoder: 0.02 of the work, less than the 0.05 that is worth ranks of its own"]
  // SHARE: sec.section "decoder" mode "train" when [] blocks ["audio", "decoder"]
  // SHARE-SAME: notes = ["audio joined decoder: 0.02 of the work, less than the 0.05 that is worth ranks of its own"]
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %h = sec.call "decoder" (%ids) args "$0" outs [""] {mode = "train", flops = "10000000*B"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
  sec.case "sound" when ["audio"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %a = sec.input "audio" : !sec.tensor<[n, 80], f32>
    %f = sec.call "audio" (%a) args "$0" outs [""] {mode = "train", flops = "2000000*n"} : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "decoder" (%ids, %f) args "$0, $1" outs [""] {mode = "train", flops = "10000000*B"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
