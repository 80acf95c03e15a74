// RUN: secc opt %s -p 'allocate{cluster="2x4xH100" global-batch=64 objective=gpus step-time=0.235}' | filecheck %s
// RUN: secc opt %s -p 'allocate{cluster="2x4xH100" global-batch=64 objective=gpus step-time=0.05}' 2>&1 | filecheck %s --check-prefix=SOON

// Four devices of the eight suffice for a step of 0.2 s, with proof; one of 0.05 s is out of reach.

// SOON: no step takes at most 0.05 s: the fastest on up to 8 ranks takes
// SOON: ask for a step time of at least

// CHECK: OPTIMAL
// CHECK-SAME: gap{{.*}}0.0,{{.*}}objective{{.*}}gpus{{.*}}deadline_s{{.*}}0.235}
sec.graph "lm" {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 4096}
  sec.block "lm" class "LM" params 300000000 trainable 300000000
  // CHECK: sec.section "lm"
  // CHECK-SAME: dp = 4 : i64
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, S, 64], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], bf16, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
