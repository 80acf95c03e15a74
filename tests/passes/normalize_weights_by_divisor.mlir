// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// The weight of a task counts once if any sample has the task's labels. Every input has a row of each sample here, zeros where a
// sample has no labels, so the divisor of the task's loss gives the shares: micro-batches without labels have none.

sec.graph "weighted" optional ["has", "kind"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "both" when ["has", "kind"] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %y = sec.input "kind" : !sec.tensor<[B, 8], f32>
    %has = sec.input "has" : !sec.tensor<[B], f32>
    %d = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %k = sec.call "net" (%y) args "$0" outs [""] : !sec.tensor<[B], f32, grad>
    %l = sec.glue "aten.mean.default" (%d) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %h = sec.glue "aten.mul.Tensor" (%k, %has) args "$0, $1" at "loss.py:4" : !sec.tensor<[B], f32, grad>
    %t = sec.glue "aten.sum.default" (%h) args "$0" at "loss.py:4" : !sec.tensor<[], f32, grad>
    // CHECK: [[COUNT:%[a-z0-9_]+]] = sec.glue "aten.sum.default" ({{%[a-z0-9_]+}}) args "$0" at "loss.py:5"
    %n = sec.glue "aten.sum.default" (%has) args "$0" at "loss.py:5" : !sec.tensor<[], f32>
    %m = sec.glue "aten.div.Tensor" (%t, %n) args "$0, $1" at "loss.py:5" : !sec.tensor<[], f32, grad>
    %w = sec.param "weight" : !sec.tensor<[], f32, grad>
    %a = sec.glue "aten.add.Tensor" (%l, %m) args "$0, $1" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%a, %w) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: [[SHARE:%[a-z0-9_]+]] = sec.glue "aten.mul.Tensor" ({{%[a-z0-9_]+}}, [[COUNT]]) args "$0, $1"
    // CHECK: sec.term "constant" ([[SHARE]]
  }
  sec.case "none" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %d = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %loss = sec.glue "aten.mean.default" (%d) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: sec.case "none"
    // CHECK-NOT: sec.term "constant"
  }
}
